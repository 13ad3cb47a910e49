"""Graft-TAIL: where a block's drafted tokens end and a chain from the successor table begins.

A DFlash block is one token per position, and its deep positions are often wrong. A chain that follows the
successor table from a token the draft is sure of may go further, in the same slots. For every start ``s`` the
expected number of accepted tokens is

    E(s) = sum_{j<=s} D_j + D_s * sum_k T_k(s)

with ``D_j`` the calibrated chance that the first ``j`` drafted tokens are all accepted, and ``T_k(s)`` that
the first ``k`` tokens of the chain from there are. The largest E wins; the drafted block itself in a tie.
Fixed shapes, no host reads: it may run inside a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda_graph.retrieve import DeviceTemplate, Retrieved, retrieve
from ..cuda_graph.successor_table import SuccessorTable, next_contexts
from ..cuda_graph.templates import Template
from ..cuda_graph.value_rule import DRAFT, TABLE, ValueMaps, value_weights


class GraftedBlock(NamedTuple):
    """A block after its tail was looked at; offsets count from 1, behind the root."""

    tokens: Tensor  # [batch, offsets] int64
    start: Tensor  # [batch] int64 drafted tokens kept; the table's chain fills the rest


def chain_template(length: int, device: torch.device | str = "cpu") -> DeviceTemplate:
    """The template that follows the likeliest successor ``length`` times."""
    paths = tuple((0,) * depth for depth in range(1, length + 1))
    return DeviceTemplate.create(Template(paths=paths, order=tuple(range(length))), device)


def calibrated(
    maps: ValueMaps,
    source: int,
    depths: Tensor,  # [nodes] int64
    path_probs: Tensor,  # [batch, nodes] float32
    tokens: Tensor,  # [batch, nodes] int64, negative where there is none
) -> Tensor:  # [batch, nodes] float32, 0 where there is no token
    """Chance that the target accepts each path."""
    weights = value_weights(maps, source, depths, path_probs, tokens)
    return weights.clamp(min=0).to(torch.int32).view(torch.float32)


def chains_from_every_start(
    table: SuccessorTable,
    template: DeviceTemplate,
    table_index: Tensor,  # [batch] int64, -1 reads nothing
    root: Tensor,  # [batch] int64 last committed token
    contexts: Tensor,  # [batch] int64 what stands before it (`successor_table`)
    drafted: Tensor,  # [batch, offsets] int64
) -> Retrieved:  # [batch * offsets, chain]
    """The table's chain behind the root, behind the first drafted token, and so on."""
    offsets = drafted.shape[1]
    # A context's lowest field is a token: the one before the root.
    line = torch.cat((contexts.unsqueeze(1), root.unsqueeze(1), drafted), dim=1)
    start = line[:, 1 : offsets + 1]
    later = next_contexts(table, line[:, : offsets - 1], line[:, 1:offsets])
    before = torch.cat((contexts.unsqueeze(1), later), dim=1)
    index = table_index.unsqueeze(1).expand(-1, offsets)
    return retrieve(
        table, template, index.flatten(), start.flatten().contiguous(), before.flatten().contiguous()
    )


def graft_tail(
    chains: Retrieved,  # from `chains_from_every_start`
    maps: ValueMaps,
    drafted: Tensor,  # [batch, offsets] int64
    confidence: Tensor,  # [batch, offsets] float32 the draft's probability of each token
    limits: Tensor,  # [batch] drafted tokens that count: the block's size minus 1
) -> GraftedBlock:
    batch, offsets = drafted.shape
    device = drafted.device
    offset = torch.arange(1, offsets + 1, device=device)
    live = offset <= limits.unsqueeze(1)  # [batch, offsets]
    length = chains.tokens.shape[1]
    depth = torch.arange(1, length + 1, device=device)
    own = calibrated(maps, DRAFT, offset, confidence.cumprod(1), drafted) * live
    theirs = calibrated(maps, TABLE, depth, chains.probs, chains.tokens).view(batch, offsets, length)
    # The chain that starts behind s drafted tokens fills offsets s + 1, s + 2, ..; those beyond do not count.
    place = torch.arange(offsets, device=device).view(1, -1, 1) + depth  # [1, starts, chain]
    theirs = (theirs * (place <= limits.view(-1, 1, 1))).sum(dim=2)  # [batch, starts]
    one = torch.ones_like(own[:, :1])
    reached = torch.cat((one, own), dim=1)  # [batch, offsets + 1] chance that the first s are right
    kept = torch.cat((torch.zeros_like(one), own.cumsum(dim=1)), dim=1)
    worth = kept[:, :-1] + reached[:, :-1] * theirs  # [batch, starts]
    drafted_whole = kept[:, -1:]
    best = worth.max(dim=1, keepdim=True)
    start = torch.where(best.values > drafted_whole + 1e-6, best.indices, offsets).squeeze(1)
    chain = chains.tokens.view(batch, offsets, length)
    chosen = chain.gather(1, start.clamp(max=offsets - 1).view(-1, 1, 1).expand(-1, 1, length)).squeeze(1)
    step = offset - 1 - start.unsqueeze(1)  # place of each offset in the chain, negative before it
    filler = chosen.gather(1, step.clamp(0, length - 1))
    use = (step >= 0) & (step < length) & (filler >= 0)
    return GraftedBlock(torch.where(use, filler, drafted), start)


def auc_by_offset(
    seen: list[list[int]],  # [offsets][bins] candidates by confidence, rising
    true: list[list[int]],  # [offsets][bins] those that were accepted
) -> list[float]:
    """How well confidence orders right before wrong candidates of each offset; 0.5 where it cannot.

    The chance that a right candidate lies in a higher bin than a wrong one, a shared bin counting half.
    """
    result = []
    for all_of, right_of in zip(seen, true, strict=True):
        right = torch.tensor(right_of, dtype=torch.float64)
        wrong = torch.tensor(all_of, dtype=torch.float64) - right
        pairs = float(right.sum() * wrong.sum())
        below = wrong.cumsum(0) - wrong
        result.append(float((right * (below + wrong / 2)).sum()) / pairs if pairs else 0.5)
    return result
