"""DFlash's recipe: loss, evaluation, export and resumption, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_graft import models
from sgl_graft.draft_training import dflash_job
from sgl_graft.draft_training.dflash import Blocks, DFlashDraft
from sgl_graft.draft_training.dflash_recipe import (
    DFlashRecipe,
    DFlashSettings,
    export_dflash,
    load_dflash,
)
from sgl_graft.draft_training.loop import TrainSettings
from sgl_graft.draft_training.simulate_dflash import accept_lengths, walk

from .test_dflash import HIDDEN, MASK, VOCAB, dialogue, make_draft, serve_block


def recipe_of(draft: DFlashDraft, embedding: Tensor, **settings: object) -> DFlashRecipe:
    return DFlashRecipe(
        draft,
        embedding,
        embedding,
        torch.arange(VOCAB // 2),
        DFlashSettings(**{"bf16": False, "anchor_share": 1.0, **settings}),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("sharpen", [1.0, 2.0])
def test_loss_is_the_decayed_cross_entropy_of_all_offsets(sharpen: float) -> None:
    """With every anchor and every offset scored, one softmax over the whole vocabulary: by hand."""
    draft, embedding = make_draft(), torch.randn(VOCAB, HIDDEN)
    sample = dialogue(40, [*range(6, 14), *range(20, 24)], 4)
    size = 5
    settings = {"smallest_block": size, "gamma": 1e9, "random_negatives": 0}
    recipe = recipe_of(draft, embedding, sharpen=sharpen, **settings)
    recipe.frequent[:] = True
    loss = recipe.loss([sample], 12, torch.Generator().manual_seed(0))
    expected = torch.zeros(())
    for first, end in ((6, 14), (20, 24)):
        for anchor in range(first, end):
            out = serve_block(draft, embedding, sample, anchor, size)
            for offset in range(1, min(size, end - anchor + 1)):
                row = int((sample.rows == anchor + offset - 1).nonzero())
                log_q = (out[offset] @ embedding.T).log_softmax(-1)[sample.top_ids[row]]
                wanted = sample.top_probs[row] ** sharpen
                expected = expected - (wanted / wanted.sum() * log_q).sum()
    torch.testing.assert_close(loss, expected / (12 * (size - 1)), rtol=1e-4, atol=1e-4)


def test_offsets_are_scored_by_their_weight() -> None:
    """Scoring offset j with probability w_j: the mean over draws is the weighted loss."""
    draft, embedding = make_draft(), torch.randn(VOCAB, HIDDEN)
    sample = dialogue(80, list(range(6, 79)), 4)
    recipe = recipe_of(draft, embedding, smallest_block=5, gamma=2.0, random_negatives=0)
    recipe.frequent[:] = True
    seen: list[Tensor] = []
    forward = draft.forward

    def record(ids: object, features: object, blocks: list[Blocks], size: int, table: Tensor) -> Tensor:
        seen.append(torch.bincount(blocks[0].scored % size, minlength=size) / len(blocks[0].anchors))
        return forward(ids, features, blocks, size, table)  # type: ignore[arg-type]

    draft.forward = record  # type: ignore[assignment, method-assign]
    random = torch.Generator().manual_seed(0)
    for _ in range(30):
        recipe.loss([sample], 73, random)
    share = torch.stack(seen).mean(0)
    assert float(share[0]) == 0.0, "the anchor is known"
    torch.testing.assert_close(share[1:], torch.exp(-torch.arange(4) / 2.0), rtol=0.1, atol=0.03)


def test_random_negatives_stand_for_the_rest_of_the_vocabulary() -> None:
    """Over draws, the softmax's normaliser is that of the whole vocabulary; without the bias it is not."""
    torch.manual_seed(0)
    embedding = torch.randn(VOCAB, HIDDEN) * 0.1
    recipe = recipe_of(make_draft(), embedding, random_negatives=24)
    hidden = torch.randn(20, HIDDEN)
    whole = (hidden @ embedding.T).exp().sum(-1)
    random = torch.Generator().manual_seed(1)
    with_bias, without = [], []
    for _ in range(300):
        tokens, bias = recipe._softmax_tokens(torch.tensor([70, 71]), random)
        assert len(tokens.unique()) == len(tokens)
        assert {*range(VOCAB // 2), 70, 71} <= set(tokens.tolist())
        logits = hidden @ embedding[tokens].T
        with_bias.append((logits + bias).exp().sum(-1))
        without.append(logits.exp().sum(-1))
    torch.testing.assert_close(torch.stack(with_bias).mean(0), whole, rtol=0.02, atol=0.0)
    assert not torch.allclose(torch.stack(without).mean(0), whole, rtol=0.1)


def test_evaluation_counts_whole_blocks_against_the_targets_likeliest() -> None:
    draft, embedding = make_draft(), torch.randn(VOCAB, HIDDEN)
    sample = dialogue(40, [*range(6, 20), *range(25, 28)], 4)
    recipe = recipe_of(draft, embedding)
    size = 5
    out = {a: serve_block(draft, embedding, sample, a, size) for a in range(6, 16)}
    # Make the draft right at the first offset everywhere and at the second for every other anchor.
    for i, a in enumerate(out):
        best = (out[a][1:] @ embedding.T).argmax(-1)
        if i % 2 == 0:
            sample.top_ids[i : i + 2, 0] = best[:2]
    hits = torch.stack(
        [
            (out[a][1:] @ embedding.T).argmax(-1) == sample.top_ids[i : i + size - 1, 0]
            for i, a in enumerate(out)
        ]
    )
    figures = recipe.evaluate([sample], every=1)
    assert figures["blocks"] == 11, "14 rows of the first answer; the second is shorter than a block"
    first = hits.float().sum(0) / 11
    assert all(abs(f - float(h)) <= 1 / 11 + 1e-4 for f, h in zip(figures["top1"], first, strict=True))
    assert figures["chain"] >= 1 + 2 * 5 / 11 - 1e-4
    half = recipe.evaluate([sample], every=2)
    assert half["blocks"] == 6


def test_export_round_trips_and_refuses_another_architecture(tmp_path: Path) -> None:
    draft = make_draft()
    export_dflash(draft, tmp_path)
    again = load_dflash(tmp_path)
    for (name, a), (_, b) in zip(draft.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16).float(), b), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 5
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [1, 2, 3]}
    assert config["num_target_layers"] == 6
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        load_dflash(tmp_path)


def job(target: Path, data: Path, run: Path, features: Path, **changes: Any) -> dflash_job.DFlashJob:
    train: dict[str, Any] = {
        "steps": 24,
        "warmup": 2,
        "decay_steps": 4,
        "lr": 2e-3,
        "eval_every": 8,
        "save_every": 8,
    }
    train |= {"threads": 1, **changes.pop("train", {})}
    return dflash_job.DFlashJob(
        target,
        (data,),
        run,
        features,
        **{"block_size": 4, "intermediate_size": 128, "frequent": 128, "mask_token_id": 319, **changes},
        batch_targets=64,
        train=TrainSettings(**train),
        dflash=DFlashSettings(bf16=False, smallest_block=2, random_negatives=64),
    )


def test_a_killed_run_continues_bit_for_bit(
    target: Path, data: Path, feature_folder: Path, tmp_path: Path
) -> None:
    records: list[dict[str, Any]] = []
    whole = dflash_job.make_trainer(job(target, data, tmp_path / "whole", feature_folder))
    whole.run(records.append)
    first, last = (sum(r["loss"] for r in part) for part in (records[:4], records[-4:]))
    assert last < 0.9 * first
    cut = dflash_job.make_trainer(job(target, data, tmp_path / "cut", feature_folder))

    class KilledError(Exception):
        pass

    def kill(record: dict[str, Any]) -> None:
        if record["step"] == 13:
            raise KilledError

    with pytest.raises(KilledError):
        cut.run(kill)
    again = dflash_job.make_trainer(job(target, data, tmp_path / "cut", feature_folder))
    assert again.step == 8
    again.run()
    for a, b in zip([*whole.params, *whole.average], [*again.params, *again.average], strict=True):
        assert torch.equal(a, b)


def test_features_and_layers_agree(target: Path, data: Path, feature_folder: Path, tmp_path: Path) -> None:
    """The card and the config name the layers whose outputs the features are."""
    the_job = job(target, data, tmp_path / "run", feature_folder, train={"steps": 1, "eval_every": 1})
    trainer = dflash_job.make_trainer(the_job)
    trainer.run()
    dflash_job.write_card(the_job, trainer, "train it", trainer.evaluate_and_export())
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    captured = next(iter(trainer.feed.shards.values())).layers
    assert [layer + 1 for layer in config["dflash_config"]["target_layer_ids"]] == list(captured)
    card = json.loads((tmp_path / "run" / "export" / "training_card.json").read_text())
    assert card["architecture"] == "DFlashDraftModel"
    assert card["answer_tokens"] == trainer.feed.num_targets


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 50}, "--mask-token-id 50"),
        ({"mask_token_id": 320}, "--mask-token-id 320"),
        ({"block_size": 1}, "--smallest-block 2"),
    ],
)
def test_bad_settings_are_refused(
    target: Path, data: Path, feature_folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dflash_job.make_trainer(job(target, data, tmp_path, feature_folder, **changes))


def test_simulated_rounds_are_those_that_blocks_served_one_by_one_would_run() -> None:
    draft, embedding = make_draft(), torch.randn(VOCAB, HIDDEN)
    sample = dialogue(60, list(range(9, 59)), 5)
    size = 4
    # The answer follows the draft in places: wherever a block's first proposals are made true.
    for anchor in (10, 18, 30):
        best = (serve_block(draft, embedding, sample, anchor, size)[1:] @ embedding.T).argmax(-1)
        sample.ids[anchor + 1 : anchor + 3] = best[:2]
    expected = []
    anchor = 10
    while anchor + size <= 60:
        best = (serve_block(draft, embedding, sample, anchor, size)[1:] @ embedding.T).argmax(-1)
        right = (best == sample.ids[anchor + 1 : anchor + size]).int().cumprod(-1)
        expected.append(int(right.sum()) + 1)
        anchor += expected[-1]
    assert expected[0] >= 3
    assert accept_lengths(draft, embedding, embedding, sample, size) == expected
    assert walk([2, 0, 3, 0, 1, 9]) == [3, 1, 2]
    short = dialogue(12, [9, 10], 6)  # ends before a block does
    assert accept_lengths(draft, embedding, embedding, short, size) == []


def test_the_shipped_draft_is_what_its_config_says_and_small() -> None:
    folder = models.path("smollm2-135m-instruct-dflash")
    draft = load_dflash(folder)  # refuses missing and unknown tensors
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == 49152
    assert config["num_target_layers"] == 30
    assert config["dflash_config"] == {"mask_token_id": 16, "target_layer_ids": [1, 14, 26]}
    assert draft.config.block_size == 8
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 15_000_000
    card = json.loads((folder / "training_card.json").read_text())
    assert card["parameters"] == sum(p.numel() for p in draft.parameters())
