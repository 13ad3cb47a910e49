"""Training sees what serving computes; losses against brute force; the job's loop on tiny data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_graft.draft_training import specblock_job, specblock_simulate
from sgl_graft.draft_training.features import Sample
from sgl_graft.draft_training.specblock_loss import prefix_mask, rank_class, rank_loss, soft_labels
from sgl_graft.draft_training.specblock_recipe import SpecBlockRecipe, SpecBlockSettings
from sgl_graft.draft_training.specblock_unroll import unroll
from sgl_graft.draft_training.vocab import DraftVocab
from sgl_graft.specblock.drafting import Drafter, DraftShape
from sgl_graft.specblock.model import SpecBlockDraft
from sgl_graft.specblock.tree import BranchRule
from sgl_graft.specblock.visibility import Places, visible

from .reference import NaiveDraft


def make_sample(length: int, rows: list[int], seed: int) -> Sample:
    random = torch.Generator().manual_seed(seed)
    probs = torch.rand(len(rows), 8, generator=random).sort(-1, descending=True).values / 8
    ids = torch.stack([torch.randperm(96, generator=random)[:8] for _ in rows])
    features = torch.randn(length, 96, generator=random)
    return Sample(
        torch.randint(0, 96, (length,), generator=random), features, torch.tensor(rows), ids, probs, "test"
    )


@pytest.fixture
def samples() -> list[Sample]:
    return [make_sample(14, [*range(2, 6), *range(8, 13)], 1), make_sample(9, list(range(1, 8)), 2)]


@pytest.fixture
def embedding() -> Tensor:
    return torch.randn(96, 32, generator=torch.Generator().manual_seed(5))


def constant(value: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.full((rows,), value)


@torch.no_grad()
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_training_computes_what_serving_does(
    draft: SpecBlockDraft, samples: list[Sample], embedding: Tensor, cut: int
) -> None:
    """Every row and block of a batch of dialogues equals the naive draft fed the same tokens."""
    blocks = unroll(draft, samples, embedding, 3, constant(cut))
    starts, checked = [0, len(samples[0].rows)], 0
    for sample, start in zip(samples, starts, strict=True):
        naive = NaiveDraft(draft, sample.features, embedding[sample.ids.roll(-1)])
        for block_number, block in enumerate(blocks):
            for index, target in enumerate(block.first.tolist()):
                if not 0 <= target - start < len(sample.rows):
                    continue
                row = int(sample.rows[target - start])
                hidden, path = naive.first[row], [(naive.base_of(row), cut)]
                for step in range(block_number):
                    token = embedding[sample.ids[row + 1 + cut * (step + 1)]]
                    hidden, kept = naive.next(hidden[cut - 1], token, row, path)
                    path.append((kept, cut))
                torch.testing.assert_close(block.hidden[index], hidden, atol=1e-4, rtol=1e-4)
                checked += 1
    assert checked == sum(len(b.first) for b in blocks)
    assert len(blocks[1].first) > 0, "no second block was compared"


@torch.no_grad()
def test_targets_stay_inside_the_answer(
    draft: SpecBlockDraft, samples: list[Sample], embedding: Tensor
) -> None:
    """Slot k of block 1 predicts the token two behind the row, plus k, of its own answer."""
    first, second = unroll(draft, samples, embedding, 2, constant(2))
    rows = [(i, int(r)) for i, s in enumerate(samples) for r in s.rows]
    for block, offset in ((first, 0), (second, 2)):
        for index, target in enumerate(block.first.tolist()):
            sample, row = rows[target]
            for slot in range(4):
                wanted = (sample, row + 1 + offset + slot)
                inside = wanted in rows and all(
                    (sample, r) in rows for r in range(row, row + 1 + offset + slot)
                )
                assert bool(block.valid[index, slot]) == inside
                if inside:
                    assert rows[int(block.target[index, slot])] == wanted


def test_visibility_follows_the_design_note() -> None:
    """All places of three rows and three blocks against section 2.5, later rows' blocks left out."""
    places = Places.of(torch.arange(3), 0, 4)
    places = places.joined(Places.of(torch.arange(3), 1, 4)).joined(Places.of(torch.arange(3), 2, 4))
    cuts = torch.tensor([3, 2]).expand(len(places.row), 2)
    found = visible(places, places, cuts)
    where = list(zip(*(p.tolist() for p in places), strict=True))
    for q, (row, block, slot) in enumerate(where):
        for k, (key_row, key_block, key_slot) in enumerate(where):
            want = (
                (key_row < row and key_block == 0)
                or (key_row == row and key_block < block and key_slot < (3, 2)[key_block])
                or (key_row == row and key_block == block and key_slot <= slot)
            )
            assert bool(found[q, k]) == want, (where[q], where[k])


def test_prefix_mask_stops_behind_the_first_miss() -> None:
    random = torch.Generator().manual_seed(0)
    right, valid = (torch.rand(64, 4, generator=random) < 0.6 for _ in range(2))
    mask = prefix_mask(right, valid)
    for row in range(64):
        for slot in range(4):
            assert bool(mask[row, slot]) == (bool(right[row, :slot].all()) and bool(valid[row, slot]))


def test_rank_classes_at_their_borders() -> None:
    top = torch.arange(20).expand(12, 20)
    wanted = torch.tensor([0, 1, 3, 4, 9, 10, 19, -1, 0, 0, 0, 0])
    assert rank_class(top, wanted).tolist()[:8] == [0, 1, 1, 2, 2, 3, 3, 3]


def test_soft_labels_lean_to_over_estimation() -> None:
    labels = soft_labels()
    torch.testing.assert_close(labels.sum(1), torch.ones(4))
    assert labels.argmax(1).tolist() == [0, 1, 2, 3]
    assert labels[1, 2] > labels[1, 0], "a class too high is the cheaper mistake"
    assert float(labels[2, 0] / labels[2, 2]) == pytest.approx(1 / 25)


def test_rank_loss_against_brute_force() -> None:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 4, 4, generator=random)
    classes = torch.randint(0, 4, (40, 4), generator=random)
    valid = torch.rand(40, 4, generator=random) < 0.8
    guess = logits.argmax(-1)
    total = weight_sum = 0.0
    for slot in range(4):
        counted = [
            row
            for row in range(40)
            if valid[row, slot] and all(guess[row, s] == classes[row, s] for s in range(slot))
        ]
        for row in counted:
            true, guessed = int(classes[row, slot]), int(guess[row, slot])
            same = sum(int(classes[other, slot]) == true for other in counted)
            mass = [1 / (1 + abs(c - true) + max(true - c, 0)) ** 2 for c in range(4)]
            log_probs = logits[row, slot].log_softmax(0).tolist()
            entropy = -sum(m / sum(mass) * p for m, p in zip(mass, log_probs, strict=True))
            weight = min(1.0, 10 / same)
            total += weight * (1 + abs(true - guessed) + max(true - guessed, 0)) * entropy
            weight_sum += weight
    assert float(rank_loss(logits, classes, valid)) == pytest.approx(total / weight_sum, rel=1e-5)


def recipe_of(draft: SpecBlockDraft, vocab: DraftVocab, embedding: Tensor, **changes: Any) -> SpecBlockRecipe:
    settings = SpecBlockSettings(**{"blocks": 2, "keep": 1.0, "bf16": False, **changes})
    return SpecBlockRecipe(draft, embedding, vocab, settings)


def test_draft_loss_against_brute_force(
    draft: SpecBlockDraft, vocab: DraftVocab, samples: list[Sample], embedding: Tensor
) -> None:
    recipe = recipe_of(draft, vocab, embedding, blocks=1, rank_weight=0.0)
    got = recipe.loss(samples, sum(len(s.rows) for s in samples), torch.Generator())
    block = unroll(draft, samples, embedding, 1, constant(1))[0]
    logits = draft.lm_head(draft.norm(block.hidden)).log_softmax(-1).detach()
    ids = torch.cat([s.top_ids for s in samples])
    probs = torch.cat([s.top_probs for s in samples])
    sums, counts = [0.0] * 4, [0] * 4
    for row in range(len(block.first)):
        for slot in range(4):
            if not block.valid[row, slot]:
                break
            target = int(block.target[row, slot])
            mapped = vocab.target_to_draft[ids[target]]
            if mapped[0] >= 0:
                counts[slot] += 1
                for token, prob in zip(mapped.tolist(), probs[target].tolist(), strict=True):
                    sums[slot] -= prob * float(logits[row, slot, token]) if token >= 0 else 0.0
            if int(logits[row, slot].argmax()) != int(mapped[0]):
                break
    least = (0.25 * block.valid.sum(0)).tolist()
    want = sum(0.8**k * sums[k] / max(1.0, least[k], counts[k]) for k in range(4))
    assert float(got.detach()) == pytest.approx(want, rel=1e-4)
    assert counts[0] > 0


def test_without_the_mask_more_slots_count(
    draft: SpecBlockDraft, vocab: DraftVocab, samples: list[Sample], embedding: Tensor
) -> None:
    losses = [
        float(
            recipe_of(draft, vocab, embedding, valid_prefix=on).loss(samples, 16, torch.Generator()).detach()
        )
        for on in (True, False)
    ]
    assert losses[1] > losses[0] + 0.1


def test_every_parameter_learns(
    draft: SpecBlockDraft, vocab: DraftVocab, samples: list[Sample], embedding: Tensor
) -> None:
    loss = recipe_of(draft, vocab, embedding).loss(samples, 16, torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(loss, list(draft.parameters()))
    for (name, _), grad in zip(draft.named_parameters(), grads, strict=True):
        assert float(grad.abs().sum()) > 0, name


def test_rank_figures() -> None:
    figures = specblock_job.rank_figures([[8, 2, 0, 0], [0, 0, 0, 0], [1, 0, 3, 0], [1, 0, 1, 4]])
    assert figures["precision"] == [0.8, 0.0, 0.75, 1.0]
    assert figures["recall"] == [0.8, 0.0, 0.75, 0.6667]
    assert figures["f1"][3] == pytest.approx(0.8, abs=1e-4)


def test_children_are_fitted_to_what_came_true() -> None:
    nothing = [0] * 16
    hits = [
        [90, 5, 3, 2, 0, *nothing],
        [20, 20, 20, 10, 3, *nothing[:-1], 27],
        [5, 5, 5, 5, 5, 5, 5, 5, 1, *nothing[:-5], 59],
        [0, 0, 0, 0, 0, *nothing[:-1], 100],
    ]
    assert specblock_job.fit_children(hits) == [2, 4, 8, 1]


def test_simulated_rounds_cover_the_answer(
    draft: SpecBlockDraft, vocab: DraftVocab, embedding: Tensor
) -> None:
    """Rounds follow each other without a gap, and rows committed round by round draft like all at once."""
    sample = make_sample(60, list(range(4, 59)), 9)
    drafter = Drafter(draft, embedding, vocab.draft_to_target, BranchRule((2, 4, 6, 4), beam=10))
    shape = DraftShape(blocks=2, leaves=4, slots=48)
    lengths = specblock_simulate.accept_lengths(drafter, sample, shape)
    assert set(lengths) - {1}, "nothing was accepted, so nothing was tested"
    assert 58 - 2 * 4 - 9 <= 4 + sum(lengths) <= 59
    row = 4
    for length in lengths:
        later = dataclasses.replace(sample, rows=sample.rows[row - 4 :])
        assert specblock_simulate.accept_lengths(drafter, later, shape)[0] == length
        row += length


def test_a_run_learns_exports_and_resumes(
    spec_target: Path, spec_data: Path, spec_features: Path, tmp_path: Path
) -> None:
    """The loss falls, a killed run continues bit for bit, and the export reads back."""
    from sgl_graft.draft_training.loop import TrainSettings
    from sgl_graft.specblock import checkpoint

    def job(run: Path, steps: int) -> specblock_job.SpecBlockJob:
        run.mkdir(exist_ok=True)
        if not (run / "features").exists():
            (run / "features").symlink_to(spec_features)
        train = TrainSettings(
            steps=steps, lr=2e-3, warmup=2, decay_steps=4, eval_every=6, save_every=6, threads=1
        )
        return specblock_job.SpecBlockJob(
            spec_target,
            (spec_data,),
            run,
            draft_vocab_size=128,
            batch_targets=64,
            train=train,
            specblock=SpecBlockSettings(blocks=2, bf16=False),
        )

    records: list[dict[str, Any]] = []
    whole = specblock_job.make_trainer(job(tmp_path / "whole", 18))
    whole.run(records.append)
    assert sum(r["loss"] for r in records[-4:]) < 0.9 * sum(r["loss"] for r in records[:4])
    figures = records[-1]["held_out"]
    assert len(figures["top1"]) == len(figures["top4"]) == 8
    assert 1.0 <= figures["chain1"] <= figures["chain"] <= 9.0

    class KilledError(Exception):
        pass

    def kill(record: dict[str, Any]) -> None:
        if record["step"] == 8:
            raise KilledError

    with pytest.raises(KilledError):
        specblock_job.make_trainer(job(tmp_path / "cut", 18)).run(kill)
    cut = specblock_job.make_trainer(job(tmp_path / "cut", 18))
    assert cut.step == 6
    cut.run()
    assert all(torch.equal(a, b) for a, b in zip(whole.params, cut.params, strict=True))

    specblock_job.write_card(job(tmp_path / "whole", 18), whole, "command", figures)
    loaded, _ = checkpoint.load(tmp_path / "whole" / "export")
    for name, value in loaded.named_parameters():
        assert torch.isfinite(value).all(), name
    assert "Rank head" in (tmp_path / "whole" / "export" / "README.md").read_text()
