"""SpecBlock's forward as the design note writes it, one row and slot at a time (sections 2.2 to 2.5)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_graft.specblock.model import SpecBlockDraft


class NaiveDraft:
    """Every row of a dialogue and every chained block behind it, without batching or caches."""

    def __init__(self, draft: SpecBlockDraft, features: Tensor, embeds: Tensor) -> None:
        """features `[rows, width]`, embeds `[rows, hidden]` of the token after each row."""
        self.draft, self.size = draft, draft.block
        # kept[layer][(row, block, slot)] = (key, value) of one attention layer, per path of blocks
        self.base: list[dict[tuple[int, int], tuple[Tensor, Tensor]]] = [{} for _ in draft.layers]
        self.first = []
        for row in range(len(features)):
            entry = draft.input_layer
            condition = entry.condition_proj(features[row])
            self.first.append(self._block(condition, embeds[row], row, []))
            for layer, kept in enumerate(self.last_kept):
                for slot, pair in enumerate(kept):
                    self.base[layer][row, slot] = pair

    def next(
        self, hidden: Tensor, embed: Tensor, row: int, path: list[tuple[list, int]]
    ) -> tuple[Tensor, list]:
        """A later block: hidden `[hidden]` of the slot it continues; path: per earlier block of the row
        (block 1 included) its kept keys and values and how many of its slots lead here. Returns hidden
        `[K, hidden]` and what this block keeps."""
        out = self._block(hidden, embed, row, path)
        return out, self.last_kept

    def base_of(self, row: int) -> list[list[tuple[Tensor, Tensor]]]:
        return [[kept[row, slot] for slot in range(self.size)] for kept in self.base]

    def _block(self, condition: Tensor, embed: Tensor, row: int, path: list[tuple[list, int]]) -> Tensor:
        draft, entry = self.draft, self.draft.input_layer
        x = []
        for slot in range(self.size):
            parts = [
                entry.condition_norm(condition),
                entry.token_norm(embed),
                entry.query_norm(entry.position_queries.weight[slot]),
            ]
            x.append(entry.fuse(torch.cat(parts)))
        self.last_kept = []
        for number, layer in enumerate(draft.layers):
            if number:
                below = list(x)
                shift = draft.shift_proj[number - 1]
                x = [shift(torch.cat([a, below[max(0, k - 1)]])) for k, a in enumerate(below)]
            normed = [layer.input_layernorm(a) for a in x]
            own = [self._kv(layer, n, row, k) for k, n in enumerate(normed)]
            self.last_kept.append(own)
            seen = [self.base[number][r, s] for r in range(row) for s in range(self.size)]
            for kept, cut in path:
                seen += kept[number][:cut]
            for k in range(self.size):
                query = self._rotated(layer.self_attn.q_proj(normed[k]), row, k)
                attended = self._attend(query, seen + own[: k + 1])
                x[k] = x[k] + layer.self_attn.o_proj(attended)
                x[k] = x[k] + layer.mlp(layer.post_attention_layernorm(x[k]))
        return torch.stack(x)

    def _kv(self, layer: torch.nn.Module, normed: Tensor, row: int, slot: int) -> tuple[Tensor, Tensor]:
        dim = layer.self_attn.head_dim
        return (
            self._rotated(layer.self_attn.k_proj(normed), row, slot),
            layer.self_attn.v_proj(normed).view(-1, dim),
        )

    def _rotated(self, flat: Tensor, row: int, slot: int) -> Tensor:
        heads = flat.view(-1, self.draft.layers[0].self_attn.head_dim)
        half = heads.shape[1] // 2
        theta = self.draft.config.rope_parameters["rope_theta"]
        out = torch.empty_like(heads)
        for pair in range(half):
            angle = (row + 1 + slot) * theta ** (-pair / half)
            a, b = heads[:, pair], heads[:, pair + half]
            out[:, pair] = a * math.cos(angle) - b * math.sin(angle)
            out[:, pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def _attend(self, query: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        group = len(query) // len(seen[0][0])
        out = []
        for head, q in enumerate(query):
            keys = torch.stack([k[head // group] for k, _ in seen])
            values = torch.stack([v[head // group] for _, v in seen])
            out.append(F.softmax(keys @ q / math.sqrt(len(q)), dim=0) @ values)
        return torch.cat(out)
