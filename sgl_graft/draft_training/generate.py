"""Batched on-policy generation: many dialogues at once from any Llama- or Qwen3-family target.

A dialogue is a *script*: forced text and generated stretches in turn, so that one pass through the batch can
let the model write the user's question, answer it, and be asked again. Rows that finish are refilled from
the queue. The KV cache is allocated once and read without expanding its heads: a decode step hands the
query heads that share a KV head to attention as if they were positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from sgl_graft.draft_training.dialogues import Dialogue

ATTENTION_NAME = "sgl_graft_grouped"
_REFILL_SHARE = 16  # refill when one row in this many is free: a prefill of one row wastes a pass
_RESCORED = 4  # bf16 logits tie within about 1%: the greedy choice is made among this many, in fp32


@dataclass(frozen=True)
class Text:
    """Tokens the dialogue contains whatever the model would say."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Generate:
    """A stretch the model writes until its end-of-turn token or `limit` tokens."""

    limit: int
    temperature: float
    answer: bool  # False: the model plays the user; drafts are not trained on that stretch


@dataclass(frozen=True)
class Script:
    """`segments` starts with Text. `source` is a label kept with the dialogue."""

    segments: tuple[Text | Generate, ...]
    source: str
    index: int = -1

    @property
    def max_len(self) -> int:
        return sum(len(s.ids) if isinstance(s, Text) else s.limit for s in self.segments)


@dataclass
class _Row:
    script: Script
    ids: list[int]
    fed: int  # tokens already in the KV cache
    segment: int = 1
    written: int = 0
    answers: list[tuple[int, int]] = field(default_factory=list)


class SlotCache:
    """Preallocated KV cache of `slots` independent rows; the object transformers calls `past_key_values`."""

    def __init__(self, config: Any, slots: int, max_len: int, dtype: torch.dtype) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (slots, config.num_key_value_heads, max_len, head_dim)
        layers = config.num_hidden_layers
        self.keys = [
            torch.zeros(shape, dtype=dtype) for _ in range(layers)
        ]  # each [slots, kv_heads, len, dim]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self.rows = torch.arange(slots)  # [batch] slot of each batch row in the next forward
        self.positions: Tensor | None = None  # [batch] write position (decode), or None (prefill from 0)
        self.width = 0  # columns a decode step reads

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store `[batch, kv_heads, new, dim]` and return what attention must read."""
        if self.positions is None:
            self.keys[layer][self.rows, :, : keys.shape[2]] = keys
            self.values[layer][self.rows, :, : keys.shape[2]] = values
            return keys, values
        self.keys[layer][self.rows, :, self.positions] = keys[:, :, 0]
        self.values[layer][self.rows, :, self.positions] = values[:, :, 0]
        return self.keys[layer][:, :, : self.width], self.values[layer][:, :, : self.width]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.width

    def keep(self, slots: Tensor) -> None:
        """Drop all slots but these, in this order."""
        self.keys = [k[slots].clone() for k in self.keys]
        self.values = [v[slots].clone() for v in self.values]
        self.rows = torch.arange(len(slots))


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention over KV heads that are never expanded in a decode step.

    query `[batch, heads, new, dim]`, key and value `[batch, kv_heads, len, dim]`, `slot_widths` (decode only;
    a prefill is causal) the columns each row reads. Returns `[batch, new, heads, dim]`.
    """
    scaling = kwargs.get("scaling")
    batch, heads, new, dim = query.shape
    if new > 1:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != key.shape[1]
        )
        return out.transpose(1, 2), None
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], dim)
    out = torch.empty_like(grouped)
    # Row by row: reading exactly a row's own columns costs less than padding all to the longest.
    for i, width in enumerate(kwargs["slot_widths"]):
        row = slice(i, i + 1)
        out[row] = F.scaled_dot_product_attention(
            grouped[row], key[row, :, :width], value[row, :, :width], scale=scaling
        )
    return out.view(batch, 1, heads, dim), None


AttentionInterface.register(ATTENTION_NAME, grouped_attention)


class Generator:
    """Runs scripts on `model`, `slots` at a time; rows no longer than `max_len` tokens."""

    def __init__(self, model: Any, *, end_of_turn: int, slots: int, max_len: int, seed: int = 0) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model.eval()
        self.end_of_turn = end_of_turn
        self.slots = slots
        self.max_len = max_len
        self.dtype = next(model.parameters()).dtype
        self.random = torch.Generator().manual_seed(seed)
        self.head_fp32 = model.lm_head.weight.detach()

    @torch.inference_mode()
    def run(
        self, scripts: Iterable[Script], on_step: Callable[[int], None] | None = None
    ) -> Iterator[Dialogue]:
        """Yield finished dialogues in completion order; `on_step(generated tokens)` after every decode.

        Scripts are drawn only as rows free up, so `scripts` may be endless. Raises ValueError for one that
        does not fit `max_len`.
        """
        queue = iter(scripts)
        waiting = self._take(queue, self.slots)
        rows: list[_Row | None] = [None] * len(waiting)
        cache = SlotCache(self.model.config, len(waiting), self.max_len, self.dtype)
        while waiting or any(rows):
            free = [i for i, row in enumerate(rows) if row is None]
            if waiting and len(free) >= max(1, len(rows) // _REFILL_SHARE):
                self._prefill(cache, rows, free, waiting)
                waiting += self._take(queue, len(rows) - len(waiting))
            elif not waiting and len(free) > len(rows) // 4:
                live = [i for i, row in enumerate(rows) if row is not None]
                cache.keep(torch.tensor(live))
                rows = [rows[i] for i in live]
            written = self._decode(cache, rows)
            for i, row in enumerate(rows):
                if row is not None and row.segment >= len(row.script.segments):
                    rows[i] = None
                    yield Dialogue(row.ids, row.answers, row.script.source, row.script.index)
            if on_step is not None:
                on_step(written)

    def _take(self, queue: Iterator[Script], count: int) -> list[Script]:
        taken = list(islice(queue, count))
        for script in taken:
            if script.max_len > self.max_len:
                raise ValueError(f"script of up to {script.max_len} tokens exceeds max_len={self.max_len}")
        return taken

    def _prefill(
        self, cache: SlotCache, rows: list[_Row | None], free: list[int], waiting: list[Script]
    ) -> None:
        """Feed the first text of new scripts, all but its last token (which the next decode feeds)."""
        started: list[tuple[int, list[int]]] = []
        for slot in free[: len(waiting)]:
            script = waiting.pop(0)
            first = script.segments[0]
            assert isinstance(first, Text) and first.ids, "a script starts with text"
            rows[slot] = _Row(script, list(first.ids), fed=len(first.ids) - 1)
            started.append((slot, list(first.ids[:-1])))
        longest = max(len(ids) for _, ids in started)
        if longest == 0:
            return
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for _, ids in started])  # [new rows, longest]
        cache.rows = torch.tensor([slot for slot, _ in started])
        cache.positions = None
        self._forward(tokens, torch.arange(longest).expand(len(started), -1), cache, None)

    def _decode(self, cache: SlotCache, rows: list[_Row | None]) -> int:
        """Feed one token to every row; append a generated token where the row has none left to feed."""
        feed = torch.tensor([row.ids[row.fed] if row else 0 for row in rows])  # [rows]
        positions = torch.tensor([row.fed if row else 0 for row in rows])  # [rows]
        cache.rows = torch.arange(len(rows))
        cache.positions = positions
        cache.width = int(positions.max()) + 1
        widths = (positions + 1).tolist()
        hidden = self._forward(feed[:, None], positions[:, None], cache, widths)[:, 0]  # [rows, hidden]
        writing = []
        for i, row in enumerate(rows):
            if row is None:
                continue
            row.fed += 1
            if row.fed == len(row.ids):
                self._enter_text(row)
                if row.fed == len(row.ids) and row.segment < len(row.script.segments):
                    writing.append(i)
        if not writing:
            return 0
        temperatures = [self._stretch(rows[i]).temperature for i in writing]
        chosen = self.choose(hidden[torch.tensor(writing)], torch.tensor(temperatures)).tolist()
        for i, token in zip(writing, chosen, strict=True):
            self._append(rows[i], token)
        return len(writing)

    def choose(self, hidden: Tensor, temperatures: Tensor) -> Tensor:
        """Next token per row `[rows]` from hidden `[rows, hidden]`; temperature 0 is greedy."""
        logits = self.model.lm_head(hidden)  # [rows, vocab]
        top = logits.topk(_RESCORED, dim=-1).indices  # [rows, _RESCORED]
        exact = torch.einsum("rkh,rh->rk", self.head_fp32[top].float(), hidden.float())
        chosen = top.gather(1, exact.argmax(-1, keepdim=True))[:, 0]
        drawn = (temperatures > 0).nonzero()[:, 0]
        if len(drawn):
            probs = torch.softmax(logits[drawn].float() / temperatures[drawn, None], dim=-1)
            below = probs.cumsum(-1)  # [drawn, vocab]
            point = torch.rand(len(drawn), 1, generator=self.random) * below[:, -1:]
            chosen[drawn] = torch.searchsorted(below, point, right=True)[:, 0].clamp_max_(probs.shape[-1] - 1)
        return chosen

    def _enter_text(self, row: _Row) -> None:
        """Append the text segments that come next."""
        segments = row.script.segments
        while row.segment < len(segments) and isinstance(text := segments[row.segment], Text):
            row.ids.extend(text.ids)
            row.segment += 1

    def _append(self, row: _Row | None, token: int) -> None:
        assert row is not None
        stretch = self._stretch(row)
        row.ids.append(token)
        row.written += 1
        if token == self.end_of_turn or row.written == stretch.limit:
            if stretch.answer:
                row.answers.append((len(row.ids) - row.written, len(row.ids)))
            if token != self.end_of_turn and row.segment + 1 < len(row.script.segments):
                row.ids.append(self.end_of_turn)  # cut short in mid-dialogue: close the turn
            row.segment += 1
            row.written = 0

    @staticmethod
    def _stretch(row: _Row | None) -> Generate:
        assert row is not None
        stretch = row.script.segments[row.segment]
        assert isinstance(stretch, Generate)
        return stretch

    def _forward(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, widths: list[int] | None
    ) -> Tensor:
        """Final hidden states `[batch, new, hidden]`."""
        return self.model.model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            slot_widths=widths,
        ).last_hidden_state
