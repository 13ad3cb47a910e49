"""SpecBlock's draft on a CPU: a block, and what it proposes, as one kernel call each.

The weights are kept a second time as the kernels want them: projections that share an input side by side, in
bf16 where that holds every value exactly. `refresh` brings them up to date after a swap.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..specblock.model import has_broadcast, has_shift
from . import kernels
from .library import INT, POINTER, function

_LANES = 16
_PLAIN_ROPE = ("default", "linear", "llama3")  # angles that do not depend on the longest position seen


class _Weight(ctypes.Structure):
    _fields_ = (("data", POINTER), ("narrow", INT))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("input_norm", "post_norm")),
        *((name, _Weight) for name in ("qkv", "out_proj", "gate_up", "down", "shift")),
        *((name, POINTER) for name in ("k_pool", "v_pool")),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        *(
            (name, INT)
            for name in (
                *(
                    "layers",
                    "hidden",
                    "heads",
                    "kv_heads",
                    "dim",
                    "intermediate",
                    "size",
                    "features",
                    "vocab",
                ),
                *("rank_width", "top", "classes", "shifts", "broadcasts"),
            )
        ),
        *((name, POINTER) for name in ("cos_sin", "condition_norm", "token_norm", "last_norm", "own")),
        *((name, _Weight) for name in ("condition", "fuse", "head", "rank_in", "rank_out")),
        ("eps", ctypes.c_float),
    )


@dataclass
class Reach:
    """Which keys the queries of one call see.

    table `[requests, places]` int32: entry of the pools, K per position, in order of position and slot.
    queries, prefix, window: per request, its queries, the entries all of them see, and those behind that are
    seen as `mask` `[requests, queries, width]` says, or causally without one.
    rows: each request's row of the table; None: in order.
    """

    table: Tensor
    queries: Sequence[int]
    prefix: Sequence[int]
    window: Sequence[int]
    mask: Tensor | None = None
    rows: Sequence[int] | None = None


def fits(draft: Any, pool_dtype: torch.dtype) -> bool:
    """Whether the kernels can run this draft over pools of this type."""
    config = draft.config
    dim = config.hidden_size // config.num_attention_heads
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        all(p.dtype == torch.float32 and p.device.type == "cpu" for p in draft.parameters())
        and pool_dtype == torch.float32
        and kernels.attention_fits(dim, dim, torch.float32)
        and config.hidden_act == "silu"
        and rope in _PLAIN_ROPE
    )


class BlockDraft:
    """Kernel calls for one draft.

    Args:
        draft: a `SpecBlockDraft` that `fits`.
        keys, values: per layer `[slots, K, kv_heads, dim]`, never replaced.
        positions: rotary positions that can occur.
    """

    def __init__(self, draft: Any, keys: Sequence[Tensor], values: Sequence[Tensor], positions: int) -> None:
        self.draft, self.size = draft, draft.block
        self._pools = (list(keys), list(values))
        self._kept: dict[str, Tensor] = {}
        self._table = _angles(draft, positions)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """The draft's weights changed."""
        draft, config = self.draft, self.draft.config
        entry = draft.input_layer
        hidden = config.hidden_size
        shared, own = entry.fuse.weight[:, : 2 * hidden], entry.fuse.weight[:, 2 * hidden :]
        queries = entry.query_norm(entry.position_queries.weight)
        self._kept["own"] = torch.nn.functional.linear(queries, own).contiguous()
        dim = hidden // config.num_attention_heads
        self.shape = _Shape(
            layers=len(draft.layers), hidden=hidden, heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads, dim=dim, intermediate=config.intermediate_size,
            size=self.size, features=entry.condition_proj.in_features, vocab=config.draft_vocab_size,
            rank_width=draft.rank_head[0].out_features, top=20, classes=config.rank_classes,
            shifts=has_shift(config), broadcasts=has_broadcast(config),
            cos_sin=self._table.data_ptr(), condition_norm=entry.condition_norm.weight.data_ptr(),
            token_norm=entry.token_norm.weight.data_ptr(), last_norm=draft.norm.weight.data_ptr(),
            own=self._kept["own"].data_ptr(),
            condition=self._weight("condition", entry.condition_proj.weight),
            fuse=self._weight("fuse", shared), head=self._weight("head", draft.lm_head.weight),
            rank_in=self._weight("rank_in", draft.rank_head[0].weight),
            rank_out=self._weight("rank_out", draft.rank_head[2].weight), eps=config.rms_norm_eps,
        )  # fmt: skip
        self.layers = (_Layer * len(draft.layers))()
        for i, layer in enumerate(draft.layers):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            self.layers[i] = _Layer(
                input_norm=layer.input_layernorm.weight.data_ptr(),
                post_norm=layer.post_attention_layernorm.weight.data_ptr(),
                qkv=self._weight(f"qkv{i}", qkv), out_proj=self._weight(f"out{i}", attention.o_proj.weight),
                gate_up=self._weight(f"gate_up{i}", gate_up),
                down=self._weight(f"down{i}", mlp.down_proj.weight),
                shift=self._weight(f"shift{i}", draft.shift_proj[i - 1].weight) if i else _Weight(),
                k_pool=self._pools[0][i].data_ptr(), v_pool=self._pools[1][i].data_ptr(),
            )  # fmt: skip

    def block(
        self,
        condition: Tensor,  # [rows, captured * hidden] if `first`, else [rows, hidden]
        embeds: Tensor,  # [rows, hidden]
        first: bool,
        places: Tensor,  # [rows] index of each row's features
        entries: Tensor,  # [rows * K] int64 entry of the pools for each slot
        reach: Reach,
        asked: Tensor | None = None,  # [asked] int64 rows whose output is wanted, ascending; None: all
        asked_reach: Reach | None = None,  # of the rows asked, where they are not all
    ) -> Tensor:  # [asked, K, hidden] before the final norm
        """One block; its keys and values are written to the pools."""
        rows = len(embeds)
        condition, embeds, entries = condition.contiguous(), embeds.contiguous(), entries.contiguous()
        positions = (places.unsqueeze(1) + torch.arange(1, self.size + 1)).flatten()
        asked = torch.arange(rows) if asked is None else asked
        out = torch.empty(len(asked), self.size, embeds.shape[1])
        alive: list[Tensor] = []  # the problems hold bare addresses
        problem = self._problem(reach, alive)
        last = problem if asked_reach is None else self._problem(asked_reach, alive)
        function("graft_block", "ppppp" + "ipippp" + "ip")(
            ctypes.addressof(self.shape), ctypes.addressof(self.layers), ctypes.addressof(problem),
            ctypes.addressof(last), condition.data_ptr(), int(first), embeds.data_ptr(), rows,
            positions.data_ptr(), entries.data_ptr(), asked.data_ptr(), len(asked), out.data_ptr(),
        )  # fmt: skip
        return out

    def propose(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """`SpecBlockDraft.propose`."""
        shape = hidden.shape[:-1]
        flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        ids = torch.empty((len(flat), width), dtype=torch.int64)
        log_probs = torch.empty((len(flat), width))
        classes = torch.empty(len(flat), dtype=torch.int64)
        function("graft_block_proposals", "ppiippp")(
            ctypes.addressof(self.shape), flat.data_ptr(), len(flat), width, ids.data_ptr(),
            log_probs.data_ptr(), classes.data_ptr(),
        )  # fmt: skip
        return ids.view(*shape, width), log_probs.view(*shape, width), classes.view(shape)

    def _problem(self, reach: Reach, alive: list[Tensor]) -> kernels.AttentionProblem:
        shape = self.shape
        table = reach.table
        starts = torch.tensor([0, *reach.queries]).cumsum(0)
        rows = range(len(reach.queries)) if reach.rows is None else reach.rows
        facts = torch.tensor([list(reach.prefix), list(reach.window), list(rows)])
        alive += [starts, facts, table]
        mask = reach.mask
        if mask is not None:
            alive.append(mask)
        return kernels.AttentionProblem(
            batch=len(reach.queries), kv_heads=shape.kv_heads, group=shape.heads // shape.kv_heads,
            dim=shape.dim, value_dim=shape.dim, k_stride=shape.kv_heads * shape.dim,
            v_stride=shape.kv_heads * shape.dim, table=table.data_ptr(), table_stride=table.stride(0),
            table_rows=facts[2].data_ptr(), query_start=starts.data_ptr(), prefix=facts[0].data_ptr(),
            window=facts[1].data_ptr(), mask=None if mask is None else mask.data_ptr(),
            mask_stride=0 if mask is None else mask.stride(0),
            mask_width=0 if mask is None else mask.shape[2],
            scale=shape.dim**-0.5,
        )  # fmt: skip

    def _weight(self, name: str, weight: Tensor) -> _Weight:
        """A contiguous copy, in bf16 where that is exact, at an address that a refresh keeps."""
        narrow = weight.bfloat16()
        exact = torch.equal(narrow.float(), weight)
        copy = narrow.contiguous() if exact else weight.detach().float().contiguous()
        kept = self._kept.get(name)
        if kept is not None and kept.dtype == copy.dtype:
            kept.copy_(copy)
        else:
            self._kept[name] = copy.clone() if copy is weight else copy
        return _Weight(self._kept[name].data_ptr(), int(exact))


@torch.no_grad()
def _angles(draft: Any, positions: int) -> Tensor:
    """Cosines, then sines, `[positions, dim]`."""
    cos, sin = draft.rotary(draft.norm.weight, torch.arange(positions).unsqueeze(0))
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float().contiguous()


def best_tree(
    tokens: Tensor, parents: Tensor, scores: Tensor, roots: Tensor, slots: int, levels: int
) -> tuple[Tensor, Tensor]:
    """`specblock.tree.best_tree_torch`: tokens and parents, `[batch, slots]`."""
    batch, total = tokens.shape
    inputs = [t.contiguous() for t in (tokens, parents, scores, roots)]
    out = [torch.empty((batch, slots), dtype=torch.int64) for _ in range(2)]
    function("graft_best_tree", "pppp" + "iiii" + "pp")(
        *(t.data_ptr() for t in inputs), batch, total, min(total, 4 * slots), slots,
        *(t.data_ptr() for t in out),
    )  # fmt: skip
    return out[0], out[1]
