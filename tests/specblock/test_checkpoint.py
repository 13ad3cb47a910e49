"""Reading and refusing checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_graft import models
from sgl_graft.draft_training.vocab import DraftVocab
from sgl_graft.specblock import checkpoint
from sgl_graft.specblock.model import SpecBlockDraft

# Design note 3.2, for K = 4 and two layers of width 32 over three captured layers.
SHAPES = {
    "input_layer.condition_proj.weight": (32, 96),
    "input_layer.condition_norm.weight": (32,),
    "input_layer.token_norm.weight": (32,),
    "input_layer.query_norm.weight": (32,),
    "input_layer.position_queries.weight": (4, 32),
    "input_layer.fuse.weight": (32, 96),
    "shift_proj.0.weight": (32, 64),
    "norm.weight": (32,),
    "lm_head.weight": (40, 32),
    "rank_head.0.weight": (256, 47),
    "rank_head.2.weight": (4, 256),
    "t2d": (96,),
    "d2t": (40,),
    **{f"layers.{i}.input_layernorm.weight": (32,) for i in range(2)},
    **{f"layers.{i}.post_attention_layernorm.weight": (32,) for i in range(2)},
    **{f"layers.{i}.self_attn.{n}_proj.weight": (32, 32) for i in range(2) for n in "qo"},
    **{f"layers.{i}.self_attn.{n}_proj.weight": (16, 32) for i in range(2) for n in "kv"},
    **{f"layers.{i}.mlp.{n}_proj.weight": (48, 32) for i in range(2) for n in ("gate", "up")},
    **{f"layers.{i}.mlp.down_proj.weight": (32, 48) for i in range(2)},
}


@pytest.fixture
def folder(draft: SpecBlockDraft, vocab: DraftVocab, tmp_path: Path) -> Path:
    checkpoint.export(draft, vocab, tmp_path)
    return tmp_path


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **change: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))


def test_names_and_shapes_are_the_released_ones(folder: Path) -> None:
    assert {n: tuple(t.shape) for n, t in load_file(folder / "model.safetensors").items()} == SHAPES


@pytest.mark.parametrize("architecture", checkpoint.ARCHITECTURES)
@pytest.mark.parametrize("prefix", ["", "model.", "module.inner."])
def test_round_trip(
    folder: Path, draft: SpecBlockDraft, vocab: DraftVocab, architecture: str, prefix: str
) -> None:
    reconfigure(folder, architectures=[architecture])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.zeros(96, 32)  # some trainers leave the target's in
    save_file({prefix + n: t for n, t in tensors.items()}, folder / "model.safetensors")
    loaded, loaded_vocab = checkpoint.load(folder)
    for name, value in draft.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], value.bfloat16().float()), name
    assert torch.equal(loaded_vocab.draft_to_target, vocab.draft_to_target)


def test_rope_base_is_the_drafts_own(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert checkpoint.read_config(folder).rope_parameters["rope_theta"] == 10000
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1000000}))
    assert checkpoint.read_config(folder).rope_parameters["rope_theta"] == 1000000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank_head.0.weight": None}, "rank_head.0.weight is missing"),
        ({"shift_proj.0.weight": None, "norm.weight": None}, "norm.weight is missing; shift_proj.0.weight"),
        ({"layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}, "layers.2.mlp.up_proj.weight is not part"),
        ({"lm_head.weight": torch.zeros(41, 32)}, r"lm_head.weight is \(41, 32\), expected \(40, 32\)"),
        ({"d2t": None}, "no d2t"),
        ({"t2d": torch.zeros(95, dtype=torch.bool)}, "t2d is"),
        ({"t2d": torch.arange(96) < 40}, "disagree"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(folder)


def test_another_block_size_does_not_load(folder: Path) -> None:
    reconfigure(folder, diffspec_draft_token_num=5)
    with pytest.raises(ValueError, match="position_queries"):
        checkpoint.load(folder)


def test_other_checkpoints_are_refused(folder: Path, vocab: DraftVocab) -> None:
    reconfigure(folder, head_dim=16)
    with pytest.raises(ValueError, match="head_dim 16"):
        checkpoint.read_config(folder)
    reconfigure(folder, architectures=["LlamaForCausalLMEagle3"], head_dim=None)
    with pytest.raises(ValueError, match="not a SpecBlock draft"):
        checkpoint.read_config(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable config"):
        checkpoint.read_config(folder)


def test_vocabulary_files_must_agree(folder: Path, vocab: DraftVocab) -> None:
    torch.save({"d2t": vocab.offsets, "t2d": vocab.members}, folder / "vocab_mapping.pt")
    checkpoint.load(folder)
    torch.save({"d2t": vocab.offsets + 1, "t2d": vocab.members}, folder / "vocab_mapping.pt")
    with pytest.raises(ValueError, match=r"vocab_mapping.pt and the weights disagree"):
        checkpoint.load(folder)


def test_the_shipped_draft_is_what_its_config_says_and_small() -> None:
    folder = models.path("smollm2-135m-instruct-specblock")
    draft, vocab = checkpoint.load(folder)  # refuses missing and unknown tensors
    assert (draft.block, len(draft.layers)) == (4, 2)
    assert len(vocab.draft_to_target) == draft.config.draft_vocab_size
    assert int(vocab.draft_to_target.max()) < draft.config.vocab_size == 49152
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 15_000_000
    card = json.loads((folder / "training_card.json").read_text())
    assert card["parameters"] == sum(p.numel() for p in draft.parameters())
