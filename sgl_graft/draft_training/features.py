"""Target features: what a draft sees and what it must predict, computed once and kept.

A feature shard holds, for the dialogues of one dialogue shard laid end to end, the captured hidden states of
every token and the target's top probabilities where an answer token follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sgl_graft.draft_training.dialogues import Dialogue

SUFFIX = ".features.safetensors"
TOP = 32  # kept probabilities per position: more than 0.97 of the mass at T = 1 on the embedded model


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose *inputs* SGLang captures for EAGLE-3 unless told otherwise (`models/llama.py`).

    It looks for each layer in a list of three as it runs, so the states come in layer order and a layer
    named twice comes once: fewer than three for a target of six layers or less.
    """
    named = {2, num_layers // 2, num_layers - 3}
    return tuple(layer for layer in range(num_layers) if layer in named)


@dataclass
class Sample:
    """One dialogue ready for training."""

    ids: Tensor  # [tokens] int64
    features: Tensor  # [tokens, layers * hidden]
    rows: Tensor  # [targets] positions whose next token is an answer token, ascending
    top_ids: Tensor  # [targets, TOP] the target's likeliest next tokens, likeliest first
    top_probs: Tensor  # [targets, TOP] their probabilities at temperature 1
    source: str


class FeatureCapture:
    """Collects the inputs of some decoder layers during a forward pass of a transformers model."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        num_layers = len(model.model.layers)
        if not all(0 <= layer < num_layers for layer in layers):
            raise ValueError(
                f"capture layers {tuple(layers)} do not all exist: the target has {num_layers} layers"
            )
        self.inputs: dict[int, Tensor] = {}
        self.layers = tuple(layers)
        for layer in set(layers):
            model.model.layers[layer].register_forward_pre_hook(self._hook(layer), with_kwargs=True)

    def take(self) -> Tensor:
        """The last pass's captured states side by side, `[batch, tokens, layers * hidden]`."""
        return torch.cat([self.inputs[layer] for layer in self.layers], dim=-1)

    def _hook(self, layer: int) -> Any:
        def remember(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            self.inputs[layer] = args[0] if args else kwargs["hidden_states"]

        return remember


def answer_rows(dialogue: Dialogue) -> list[int]:
    """Positions whose next token the assistant wrote."""
    return [p for start, end in dialogue.answers for p in range(start - 1, end - 1)]


@torch.inference_mode()
def compute(
    model: Any, capture: FeatureCapture, dialogues: Sequence[Dialogue], path: Path, batch_tokens: int = 2048
) -> int:
    """Write the feature shard of `dialogues` atomically; returns the number of tokens.

    Dialogues run in batches of similar length, right-padded: causal attention makes the padding harmless.
    """
    features: dict[int, Tensor] = {}
    tops: dict[int, tuple[Tensor, Tensor]] = {}
    order = sorted(range(len(dialogues)), key=lambda i: len(dialogues[i].ids))
    while order:
        longest = len(dialogues[order[-1]].ids)
        batch = [order.pop() for _ in range(min(len(order), max(1, batch_tokens // longest)))]
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, i in enumerate(batch):
            ids[row, : len(dialogues[i].ids)] = torch.tensor(dialogues[i].ids)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [batch, longest, hidden]
        captured = capture.take()  # [batch, longest, layers * hidden]
        for row, i in enumerate(batch):
            features[i] = captured[row, : len(dialogues[i].ids)].to(torch.bfloat16, copy=True)
            logits = model.lm_head(hidden[row, answer_rows(dialogues[i])]).float()  # [targets, vocab]
            top = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
            probs = (top.values - logits.logsumexp(-1, keepdim=True)).exp()
            tops[i] = (top.indices.to(torch.int32), probs.to(torch.float16))
    count = range(len(dialogues))
    tensors = {
        "ids": torch.tensor([t for d in dialogues for t in d.ids], dtype=torch.int32),
        "features": torch.cat([features[i] for i in count]),
        "rows": torch.tensor([p for d in dialogues for p in answer_rows(d)], dtype=torch.int32),
        "top_ids": torch.cat([tops[i][0] for i in count]),
        "top_probs": torch.cat([tops[i][1] for i in count]),
        "ends": torch.tensor([len(d.ids) for d in dialogues]).cumsum(0),
        "row_ends": torch.tensor([len(answer_rows(d)) for d in dialogues]).cumsum(0),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    metadata = {
        "sources": "\n".join(d.source for d in dialogues),
        "layers": ",".join(str(layer) for layer in capture.layers),
    }
    save_file(tensors, scratch, metadata=metadata)
    scratch.replace(path)
    return int(tensors["ids"].numel())


class FeatureShard:
    """One shard's samples, held in memory (3.5 KB per token of the embedded target).

    Not mapped from the file: on a machine short of memory the pages of a mapping go first, and training then
    waits for the disk at every batch.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            self.tensors: dict[str, Tensor] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        self.sources: list[str] = metadata["sources"].split("\n")
        self.layers = tuple(int(layer) for layer in metadata["layers"].split(","))
        self.ends: list[int] = self.tensors["ends"].tolist()
        self.row_ends: list[int] = self.tensors["row_ends"].tolist()

    def __len__(self) -> int:
        return len(self.ends)

    def num_targets(self, i: int) -> int:
        return self.row_ends[i] - (self.row_ends[i - 1] if i else 0)

    def sample(self, i: int, max_len: int | None = None) -> Sample:
        """Dialogue `i`, cut to its first `max_len` tokens."""
        start, end = (self.ends[i - 1] if i else 0), self.ends[i]
        first, last = (self.row_ends[i - 1] if i else 0), self.row_ends[i]
        if max_len is not None:
            end = min(end, start + max_len)
        rows = self.tensors["rows"][first:last].long()
        last = first + int((rows < end - start).sum())
        return Sample(
            ids=self.tensors["ids"][start:end].long(),
            features=self.tensors["features"][start:end],
            rows=rows[: last - first],
            top_ids=self.tensors["top_ids"][first:last].long(),
            top_probs=self.tensors["top_probs"][first:last].float(),
            source=self.sources[i],
        )
