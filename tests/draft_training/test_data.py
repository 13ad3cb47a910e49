"""Dialogues on disk, prompts, batched generation, features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl_graft.draft_training import dialogues, features, make_data, prompts, vocab
from sgl_graft.draft_training.dialogues import Dialogue
from sgl_graft.draft_training.generate import Generate, Generator, Script, Text
from sgl_graft.models import tiny


@pytest.fixture
def few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading Python's whole library takes seconds."""
    monkeypatch.setattr(prompts, "library_functions", lambda: ('def add(a, b):\n    """Sum."""\n',))


def test_dialogues_round_trip(tmp_path: Path) -> None:
    written = [
        Dialogue([1, 70_000, 3, 4], [(2, 4)], "self", 7),
        Dialogue([5], [], "math", 8),
        Dialogue([1, 2, 3, 4, 5], [(1, 2), (3, 5)], "self", 9),
    ]
    file = tmp_path / f"a{dialogues.SUFFIX}"
    dialogues.save(file, written, {"target": "t"})
    read = dialogues.load(file)
    assert read.dialogues == written
    assert read.header["target"] == "t"
    assert dialogues.load_all([tmp_path]) == written
    with pytest.raises(ValueError, match="no dialogues"):
        dialogues.load_all([tmp_path / "empty"])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_generation_equals_one_at_a_time(family: str, tmp_path: Path) -> None:
    """Refilled slots, forced text and different lengths change nothing: every greedy answer is the argmax."""
    folder = tiny.build(tmp_path / family, family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    random = torch.Generator().manual_seed(0)
    scripts = []
    for i in range(9):
        first = torch.randint(3, 200, (1 + 3 * i,), generator=random).tolist()
        segments = (Text(tuple(first)), Generate(4 + i, 0.0, True), Text((9, 8, 7)), Generate(5, 0.0, True))
        scripts.append(Script(segments, "test", i))
    generator = Generator(model, end_of_turn=2, slots=4, max_len=64)
    written = sorted(generator.run(scripts), key=lambda d: d.index)
    assert [d.index for d in written] == list(range(9))
    model.set_attn_implementation("eager")
    for script, dialogue in zip(scripts, written, strict=True):
        first = script.segments[0]
        assert isinstance(first, Text)
        assert tuple(dialogue.ids[: len(first.ids)]) == first.ids
        assert len(dialogue.answers) == 2
        likeliest = model(torch.tensor([dialogue.ids])).logits[0].argmax(-1).tolist()
        for start, end in dialogue.answers:
            assert dialogue.ids[start:end] == likeliest[start - 1 : end - 1]


def test_sampling_follows_the_distribution(target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    generator = Generator(model, end_of_turn=2, slots=1, max_len=8, seed=3)
    hidden = torch.randn(model.config.hidden_size).mul(0.5).expand(20_000, -1)
    with torch.inference_mode():
        tokens = generator.choose(hidden, torch.full((20_000,), 0.8))
        drawn = torch.bincount(tokens, minlength=tiny.VOCAB_SIZE)
        expected = (model.lm_head(hidden[:1])[0] / 0.8).softmax(-1)
    assert float((drawn / 20_000 - expected).abs().sum()) < 0.1


def test_too_long_script_is_refused(target: Path) -> None:
    generator = Generator(AutoModelForCausalLM.from_pretrained(target), end_of_turn=2, slots=1, max_len=8)
    with pytest.raises(ValueError, match="max_len=8"):
        next(generator.run([Script((Text((1,)), Generate(9, 0.0, True)), "test")]))


@pytest.mark.usefixtures("few_functions")
def test_interrupted_generation_continues(target: Path, tmp_path: Path) -> None:
    job = make_data.DataJob(target, tmp_path, tokens=400, slots=4, shard_dialogues=2, dtype="float32")
    first = make_data.run(job)
    more = make_data.run(make_data.DataJob(**{**job.__dict__, "tokens": first + 300}))
    assert more >= first + 300
    indices = [d.index for d in dialogues.load_all([tmp_path])]
    assert len(indices) == len(set(indices)), "no script is answered twice"


@pytest.mark.usefixtures("few_functions")
def test_scripts_depend_on_seed_and_index_only() -> None:
    source = prompts.ScriptSource(tiny.tokenizer(), prompts.SHORT_MIX, seed=5, math_prompts=["1 + 1?"])
    again = prompts.ScriptSource(tiny.tokenizer(), prompts.SHORT_MIX, seed=5, math_prompts=["1 + 1?"])
    assert [source.script(i) for i in range(50)] == [again.script(i) for i in range(50)]
    assert next(source.scripts(3, 2, frozenset({3}))) == source.script(5)


def test_library_functions_are_signature_and_docstring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = 'import os\n\n\ndef kept(a):\n    """Say a."""\n    return a\n\n\ndef bare(b):\n    return b\n'
    (tmp_path / "module.py").write_text(source)
    monkeypatch.setattr(prompts.sysconfig, "get_path", lambda name: str(tmp_path))
    prompts.library_functions.cache_clear()
    assert prompts.library_functions() == ('def kept(a):\n    """Say a."""\n',)
    prompts.library_functions.cache_clear()


def test_template_pieces_rebuild_the_template() -> None:
    tokenizer = tiny.tokenizer()
    pieces = prompts.ChatPieces.of(tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    end = [pieces.end_of_turn]
    built = [*pieces.opening, *encode("hi"), *end, *pieces.to_answer, *encode("yes"), *end, *pieces.to_user]
    turns = (("user", "hi"), ("assistant", "yes"), ("user", ""))
    rendered = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in turns], tokenize=False)
    assert built == encode(rendered.removesuffix("<|im_end|>\n"))


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 6, 7, 30])
def test_captured_layers_are_those_that_sglang_captures(num_layers: int) -> None:
    named = [2, num_layers // 2, num_layers - 3]  # set_eagle3_layers_to_capture(None)
    assert features.default_layers(num_layers) == tuple(i for i in range(num_layers) if i in named)
    assert features.default_layers(30) == (2, 15, 27)
    assert features.default_layers(3) == (0, 1, 2)


def test_features_are_what_the_target_computes(target: Path, data: Path, feature_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    written = dialogues.load(sorted(data.glob("*"))[0]).dialogues
    shard = features.FeatureShard(sorted(feature_folder.glob("*"))[0])
    assert len(shard) == len(written)
    assert shard.layers == (2, 3) == features.default_layers(6)
    for i in (0, 11):
        sample = shard.sample(i)
        out = model(torch.tensor([written[i].ids]), output_hidden_states=True)
        # transformers' hidden_states[l] is the input of layer l
        expected = torch.cat([out.hidden_states[layer][0] for layer in shard.layers], dim=-1)
        torch.testing.assert_close(sample.features.float(), expected, atol=0.03, rtol=0.01)
        assert sample.rows.tolist() == features.answer_rows(written[i])
        probs = out.logits[0].softmax(-1)[sample.rows]
        assert torch.equal(sample.top_ids[:, 0], probs.argmax(-1))
        torch.testing.assert_close(sample.top_probs, probs.gather(1, sample.top_ids), atol=2e-3, rtol=0.01)
    cut = shard.sample(0, max_len=10)
    assert len(cut.ids) == 10
    assert int(cut.rows.max()) <= 9


def test_draft_vocabulary_prefers_answers() -> None:
    said = Dialogue([50, 50, 50, 7, 7, 9], [(3, 6)], "self")
    chosen = vocab.choose([said], size=4, vocab_size=100)
    assert chosen.draft_to_target.tolist() == [0, 7, 9, 50]
    assert (chosen.offsets + torch.arange(4)).tolist() == [0, 7, 9, 50]
    assert chosen.members.nonzero()[:, 0].tolist() == [0, 7, 9, 50]
    assert chosen.target_to_draft[9] == 2
    with pytest.raises(ValueError, match="101"):
        vocab.choose([said], size=101, vocab_size=100)
