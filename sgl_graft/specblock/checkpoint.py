"""SpecBlock checkpoints: `config.json` and `model.safetensors` as the released drafts have them.

Wrong, missing and unknown tensors are errors: a draft that loads in part drafts badly and says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from sgl_graft.draft_training.vocab import DraftVocab
from sgl_graft.specblock.model import SpecBlockDraft, head_dim

# The reference trains under the first name and serves under the second; the tensors are the same.
ARCHITECTURES = ("LlamaForCausalLMSpecBlock", "LlamaForCausalLMSpecBlockShift")
_WRAPPERS = ("module.", "model.", "inner.")  # prefixes that training wrappers leave on names
_EMBEDDING = "embed_tokens.weight"  # the target's, frozen; not part of a draft


def read_config(folder: Path) -> LlamaConfig:
    """The draft's config.

    A config without `rope_theta` means base 10000, also where the target has another.
    Raises ValueError for another architecture, a head size the model cannot have, or a file that is none.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not a readable config: {error}") from error
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(f"{folder} holds {names}, not a SpecBlock draft ({' or '.join(ARCHITECTURES)})")
    try:
        config = LlamaConfig(**raw)
    except StrictDataclassError as error:
        raise ValueError(f"{file} describes no model: {error}") from error
    stated = raw.get("head_dim")
    if stated is not None and stated != head_dim(config):
        raise ValueError(
            f"{file}: head_dim {stated} is not hidden_size / num_attention_heads = {head_dim(config)}, "
            "which is what a SpecBlock draft is trained with"
        )
    return config


def load_state(draft: SpecBlockDraft, tensors: Iterable[tuple[str, Tensor]]) -> DraftVocab:
    """Copy a checkpoint's tensors into `draft`; returns its vocabulary.

    Raises ValueError naming every tensor that is missing, unknown or of another shape.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors:
        plain = _plain_name(name)
        if plain in found:
            raise ValueError(f"two tensors of the checkpoint are called {plain!r} (one of them as {name!r})")
        if plain != _EMBEDDING:
            found[plain] = tensor
    vocab = _vocab(draft, found)
    own = dict(draft.named_parameters())
    problems = [f"{name} is missing" for name in own if name not in found]
    problems += [f"{name} is not part of a SpecBlock draft" for name in found if name not in own]
    problems += [
        f"{name} is {tuple(found[name].shape)}, expected {tuple(value.shape)}"
        for name, value in own.items()
        if name in found and found[name].shape != value.shape
    ]
    if problems:
        raise ValueError("this is not the checkpoint of such a draft: " + "; ".join(sorted(problems)))
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(found[name])
    return vocab


def load(folder: Path) -> tuple[SpecBlockDraft, DraftVocab]:
    """An exported or released draft, as an fp32 module.

    Raises ValueError as `read_config` and `load_state` do, and when a `vocab_mapping.pt` beside the weights
    contradicts them.
    """
    draft = SpecBlockDraft(read_config(folder))
    vocab = load_state(draft, load_file(folder / "model.safetensors").items())
    mapping = folder / "vocab_mapping.pt"
    if mapping.is_file():
        stored = torch.load(mapping, weights_only=True)
        if not torch.equal(stored["d2t"].long(), vocab.offsets):
            raise ValueError(f"{mapping} and the weights disagree on the draft vocabulary (d2t)")
    return draft, vocab


def export(draft: SpecBlockDraft, vocab: DraftVocab, folder: Path) -> None:
    """Write the draft in bf16, under the name that the reference serves."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in draft.named_parameters()}
    tensors["d2t"], tensors["t2d"] = vocab.offsets, vocab.members
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = draft.config.to_dict()
    config["architectures"] = [ARCHITECTURES[1]]
    config["dtype"] = "bfloat16"
    for stale in ("_name_or_path", "transformers_version", "torch_dtype"):
        config.pop(stale, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _plain_name(name: str) -> str:
    stripped = True
    while stripped:
        stripped = False
        for prefix in _WRAPPERS:
            if name.startswith(prefix):
                name, stripped = name.removeprefix(prefix), True
    return name


def _vocab(draft: SpecBlockDraft, found: dict[str, Tensor]) -> DraftVocab:
    """Take `d2t` and `t2d` out of `found` and check them against the config and each other."""
    size, whole = draft.config.draft_vocab_size, draft.config.vocab_size
    offsets, members = _take(found, "d2t", (size,)), _take(found, "t2d", (whole,))
    tokens = offsets.long() + torch.arange(size, device=offsets.device)
    vocab = DraftVocab.of(tokens.cpu(), whole)
    if not torch.equal(vocab.draft_to_target, tokens.cpu()):
        raise ValueError("d2t does not list the draft's tokens in ascending order")
    if not torch.equal(vocab.members, members.bool().cpu()):
        raise ValueError("d2t and t2d of the checkpoint disagree on which tokens the draft has")
    return vocab


def _take(found: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in found:
        raise ValueError(f"the checkpoint has no {name}, so its tokens cannot be told")
    tensor = found.pop(name)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, the config says {shape}")
    return tensor
