"""Recipe for EAGLE-3: initial weights, loss, held-out acceptance, export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from sgl_graft.draft_training.eagle3 import Eagle3Draft, Unrolled
from sgl_graft.draft_training.features import Sample
from sgl_graft.draft_training.loss import soft_head_loss
from sgl_graft.draft_training.vocab import DraftVocab


@dataclass(frozen=True)
class Eagle3Settings:
    """`step_decay` weights step k of the chain by its k-th power (EAGLE-3 uses 0.8); `keep` is the share of
    chains that go on after the first step; `bf16` runs matrix products in bfloat16 (twice as fast where the
    CPU has AVX-512 BF16)."""

    steps: int = 5
    step_decay: float = 0.8
    keep: float = 0.5
    bf16: bool = True


class Eagle3Recipe:
    """See `loop.Recipe`."""

    def __init__(
        self,
        module: Eagle3Draft,
        embedding: Tensor,
        vocab: DraftVocab,
        settings: Eagle3Settings | None = None,
    ) -> None:
        self.module = module
        self.vocab = vocab
        self.settings = settings or Eagle3Settings()
        self.dtype = torch.bfloat16 if self.settings.bf16 else torch.float32
        self.embedding = embedding.detach().to(self.dtype)  # [vocab, hidden] the target's, frozen

    def loss(self, samples: Sequence[Sample], denominator: int, random: torch.Generator) -> Tensor:
        settings = self.settings
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
            out = self.module.unroll(samples, self.embedding, settings.steps, settings.keep, random)
        ids, probs = self._targets(samples)
        weights = [
            torch.full(
                (len(rows),), settings.step_decay**step / (denominator * (settings.keep if step else 1.0))
            )
            for step, rows in enumerate(out.target)
        ]
        target = torch.cat(out.target)
        return soft_head_loss(
            torch.cat(out.normed),
            self.module.lm_head.weight,
            ids[target],
            probs[target],
            torch.cat(weights),
            self.dtype,
        )

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Per depth, over all held-out rows fed the true tokens: how often the target's likeliest is the
        draft's first (`top1`) or among its first four (`top4`), and `chain`, the mean accept length of a
        greedy chain of `steps` proposals, bonus included.
        """
        steps = self.settings.steps
        hits = {1: [0.0] * steps, 4: [0.0] * steps}
        counts = [0] * steps
        chain_total = chain_rows = 0.0
        for start in range(0, len(samples), 8):
            part = samples[start : start + 8]
            with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.bf16):
                out = self.module.unroll(part, self.embedding, steps)
            likeliest = torch.cat([s.top_ids[:, 0] for s in part])  # [targets]
            unbroken = torch.ones(
                len(likeliest), dtype=torch.bool
            )  # [targets] chain accepted so far, by its row
            for step, (top, target) in enumerate(zip(self._proposals(out), out.target, strict=True)):
                right = top == likeliest[target][:, None]  # [rows, 4]
                hits[1][step] += float(right[:, 0].sum())
                hits[4][step] += float(right.any(-1).sum())
                counts[step] += len(target)
                still = torch.zeros_like(unbroken)
                still[target - 1 - step] = right[:, 0]
                unbroken &= still
                chain_total += float(unbroken.sum())
            chain_rows += len(out.target[0])
        rate = {n: [round(h / max(1, c), 4) for h, c in zip(hits[n], counts, strict=True)] for n in (1, 4)}
        return {"top1": rate[1], "top4": rate[4], "chain": round(1 + chain_total / max(1.0, chain_rows), 4)}

    def export(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` (bf16) for stock SGLang."""
        export_eagle3(self.module, self.vocab, folder)

    def _targets(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Draft ids and probabilities `[targets, TOP]`; probability 0 where the draft has no such token."""
        ids = self.vocab.target_to_draft[torch.cat([s.top_ids for s in samples])]
        probs = torch.cat([s.top_probs for s in samples]) * (ids >= 0)
        return ids.clamp_min(0), probs

    def _proposals(self, out: Unrolled) -> list[Tensor]:
        """Per step the draft's four likeliest tokens as target ids, `[rows, 4]`."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.bf16):
            return [
                self.vocab.draft_to_target[self.module.lm_head(n).topk(4, dim=-1).indices] for n in out.normed
            ]


@torch.no_grad()
def init_from_target(draft: Eagle3Draft, target: Any, vocab: DraftVocab) -> None:
    """Start from what the target knows: its LM head's rows, its final norm, and its last layer's MLP and
    attention read through an identity on the last captured feature. Widths that differ stay random.

    `target` is a transformers model of the Llama or Qwen3 family.
    """
    width = draft.config.hidden_size
    draft.lm_head.weight.copy_(target.lm_head.weight[vocab.draft_to_target])
    draft.norm.weight.copy_(target.model.norm.weight)
    last = target.model.layers[-1]
    layer = draft.midlayer
    draft.fc.weight.normal_(0.0, 0.01)
    draft.fc.weight[:, -width:] += torch.eye(width)
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.input_layernorm.weight.copy_(last.input_layernorm.weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        ours, theirs = getattr(layer.self_attn, name).weight, getattr(last.self_attn, name).weight
        if ours.shape[0] == theirs.shape[0]:
            ours.normal_(0.0, 0.02)
            ours[:, width:].copy_(theirs)
    if layer.self_attn.o_proj.weight.shape == last.self_attn.o_proj.weight.shape:
        layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    mlp = getattr(last.mlp, "gate_proj", None)
    if isinstance(mlp, nn.Linear) and mlp.weight.shape == layer.mlp.gate_proj.weight.shape:
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)


def export_eagle3(draft: Eagle3Draft, vocab: DraftVocab, folder: Path) -> None:
    """Write the draft as `LlamaForCausalLMEagle3`: bf16 weights, `d2t` offsets, `t2d` membership; no
    embedding, because SGLang shares the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in draft.state_dict().items()
        if not name.startswith("rotary.")
    }
    tensors["d2t"] = vocab.offsets
    tensors["t2d"] = vocab.members
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = draft.config.to_dict()
    config["dtype"] = "bfloat16"
    for stale in ("_name_or_path", "transformers_version", "torch_dtype"):
        config.pop(stale, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_eagle3(folder: Path) -> tuple[Eagle3Draft, DraftVocab]:
    """Read an exported draft back (fp32 module). Raises ValueError for another architecture."""
    from safetensors.torch import load_file

    raw = json.loads((folder / "config.json").read_text())
    if raw.get("architectures") != ["LlamaForCausalLMEagle3"]:
        raise ValueError(
            f"{folder} holds {raw.get('architectures')}, not an EAGLE-3 draft (LlamaForCausalLMEagle3)"
        )
    config = LlamaConfig(**raw)
    tensors = load_file(folder / "model.safetensors")
    offsets, members = tensors.pop("d2t"), tensors.pop("t2d")
    vocab = DraftVocab.of(offsets + torch.arange(len(offsets)), len(members))
    draft = Eagle3Draft(config, tensors["fc.weight"].shape[1] // config.hidden_size)
    draft.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=False)
    return draft, vocab
