"""Recording and replay, held against plain forward passes and the trainer's own simulation."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sgl_graft.bench.answers import KnownAnswer
from sgl_graft.bench.recorder import Recorder, record_all
from sgl_graft.bench.recording import Recording, Shape
from sgl_graft.bench.replay import Calibrated, Setting, replay
from sgl_graft.draft_training.eagle3 import Eagle3Draft, draft_config
from sgl_graft.draft_training.features import Sample
from sgl_graft.draft_training.simulate import TreeShape, accept_lengths
from sgl_graft.draft_training.vocab import DraftVocab

SHAPE = Shape(steps=4, topk=3, slots=10)
VOCAB = 48
PROMPTS = ((1, 2, 3, 4, 5), (9, 8, 7, 9, 8, 7, 9))
LENGTH = 24


@dataclass(frozen=True)
class Made:
    recorder: Recorder
    answers: list[KnownAnswer]
    recording: Recording


@pytest.fixture(scope="module")
def made() -> Made:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    draft = Eagle3Draft(draft_config(config, draft_vocab_size=40)).eval()
    recorder = Recorder(model, draft, DraftVocab.of(torch.arange(40), VOCAB), SHAPE)
    answers = [
        KnownAnswer("a" if i == 0 else "b", i, prompt, greedy(model, prompt))
        for i, prompt in enumerate(PROMPTS)
    ]
    return Made(recorder, answers, record_all(recorder, answers))


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt: tuple[int, ...]) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(LENGTH):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@torch.inference_mode()
def test_successors_of_tree_nodes_are_those_of_a_plain_pass(made: Made) -> None:
    answer = made.recording.answers[0]
    checked = 0
    for position in (0, 7, LENGTH - 1):
        tokens, parents = answer.tree_tokens[position].tolist(), answer.tree_parents[position].tolist()
        paths: list[list[int]] = [[]]
        for slot in range(1, SHAPE.slots):
            if parents[slot] < 0:
                paths.append([])
                continue
            paths.append([*paths[parents[slot]], tokens[slot]])
            ids = [*answer.prompt.tolist(), *answer.tokens[: position + 1].tolist(), *paths[slot]]
            probs = made.recorder.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
            best = probs.topk(4)
            assert answer.tree_ids[position, slot, :4].tolist() == best.indices.tolist()
            torch.testing.assert_close(
                answer.tree_probs[position, slot, :4].float(), best.values, atol=1e-3, rtol=0
            )
            checked += 1
    assert checked > 2 * (SHAPE.slots - 1)
    # The root's own row is the answer's: what the target says after the tokens so far.
    assert torch.equal(answer.tree_ids[:, 0, 0], answer.next_ids[:, 0])
    assert torch.equal(answer.next_ids[:-1, 0].long(), answer.tokens[1:])


@torch.inference_mode()
def test_stock_trees_accept_what_the_trainers_simulation_accepts(made: Made) -> None:
    rows = replay(Setting("EAGLE3", "eagle", SHAPE.slots), made.recording, Calibrated.none())
    for given, row in zip(made.answers, rows, strict=True):
        ids = torch.tensor([*given.prompt, *given.tokens])
        made.recorder.model.model(input_ids=ids[None])
        sample = Sample(
            ids=ids,
            features=made.recorder.capture.take()[0],
            rows=torch.arange(len(given.prompt) - 1, len(ids) - 1),
            top_ids=ids[:0],
            top_probs=ids[:0],
            source="test",
        )
        # The simulation leaves out the last rounds, which the end of the answer could cut short.
        shape = TreeShape(SHAPE.steps, SHAPE.topk, SHAPE.slots)
        lengths = accept_lengths(
            made.recorder.draft, made.recorder.vocab, made.recorder.embedding, sample, shape
        )
        assert row.index == given.index
        assert row.num_tokens == LENGTH - 1
        assert sum(lengths) <= row.num_tokens
        rest = row.num_tokens - sum(lengths)
        assert len(lengths) + (rest > 0) <= row.num_rounds <= len(lengths) + rest


def test_a_recording_survives_the_disk(made: Made, tmp_path: Path) -> None:
    made.recording.save(tmp_path / "r.safetensors")
    again = Recording.load(tmp_path / "r.safetensors")
    assert (again.shape, again.names, again.vocab_size) == (SHAPE, (("a", 0), ("b", 1)), VOCAB)
    assert torch.equal(again.answers[1].tree_probs, made.recording.answers[1].tree_probs)
    with pytest.raises(ValueError, match="no recording at"):
        Recording.load(tmp_path / "none")


def test_answers_that_are_not_greedy_are_refused(made: Made) -> None:
    wrong = tuple((token + 1) % VOCAB for token in made.answers[0].tokens)
    with pytest.raises(ValueError, match="journal of a T = 0 run"):
        made.recorder.record(made.answers[0].prompt, wrong)


def test_an_answer_is_cut_where_the_target_would_have_gone_elsewhere(made: Made) -> None:
    given = made.answers[0]
    strange = next(token for token in range(VOCAB) if token != given.tokens[10])
    cut = made.recorder.record(given.prompt, (*given.tokens[:10], strange, *given.tokens[11:]), cut=True)
    whole = made.recording.answers[0]
    assert cut.tokens.tolist() == list(given.tokens[:10])
    assert torch.equal(cut.next_ids, whole.next_ids[:10])
    assert torch.equal(cut.pool_tokens, whole.pool_tokens[:10])
    assert torch.equal(cut.tree_ids, whole.tree_ids[:10])


def test_recording_continues_where_it_stopped(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "r.safetensors"
    record_all(made.recorder, made.answers[:1], file)
    before = Recording.load(file).answers[0]
    never = KnownAnswer(*[getattr(made.answers[0], field) for field in ("dataset", "index")], (1,), (2, 3))
    again = record_all(made.recorder, [never, made.answers[1]], file)  # the first is there: not looked at
    assert again.names == made.recording.names == Recording.load(file).names
    assert torch.equal(again.answers[0].tokens, before.tokens)
    joined = Recording.join([again, made.recording])
    assert len(joined.answers) == len(joined.names) == 4
    other = Recording(Shape(2, 2, 4), VOCAB, (), ())
    with pytest.raises(ValueError, match="cannot be replayed together"):
        Recording.join([again, other])
