"""From blocks to a verify tree: which proposals become nodes, and which nodes the next block continues.

Plain torch of fixed shapes, without reading a value back (design note 5.2). A candidate is one proposal of
one slot of one leaf; its parent is the likeliest proposal of the slot before. Candidates stand in the order
they were made, so a parent always stands before its children.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda_graph.dispatch import host_op

ABSENT = float("-inf")
MAX_LEVELS = 32  # of a tree: blocks times K


@dataclass(frozen=True)
class BranchRule:
    """How many proposals of a slot become nodes.

    Attributes:
        children: by rank class (1, 2-4, 5-10, above 10), the likeliest one included. 0 gives up: from such a
            slot on only likeliest proposals are kept, and no block continues there.
        beam: of the first slot of block 1, whatever its class.
        spare_sure: fewer children where the likeliest proposal is nearly certain, as the reference's
            command-line tool has it and its server has not.
    """

    children: tuple[int, int, int, int] = (2, 4, 6, 4)
    beam: int = 10
    spare_sure: bool = False

    @property
    def width(self) -> int:
        """Most proposals of one slot that can become nodes."""
        return max(self.beam, *self.children)


class Proposals(NamedTuple):
    """What one block proposes for every leaf it continues (block 1: for the one root)."""

    tokens: Tensor  # [batch, leaves, K, width] int64 target token ids, likeliest first
    log_probs: Tensor  # [batch, leaves, K, width] float32, descending
    classes: Tensor  # [batch, leaves, K] int64 guessed rank class


class Leaves(NamedTuple):
    """Nodes that the next block continues."""

    nodes: Tensor  # [batch, leaves] candidate index
    source: Tensor  # [batch, leaves] leaf of the last block that proposed it
    slot: Tensor  # [batch, leaves] slot of that block
    tokens: Tensor  # [batch, leaves]
    scores: Tensor  # [batch, leaves] log-probability of the path, ABSENT where there is no such leaf


class Nodes(NamedTuple):
    """Nodes from another source, which hang below the root among themselves."""

    tokens: Tensor  # [batch, nodes]
    parents: Tensor  # [batch, nodes] index among them, -1 the root; before the node, scoring at least as much
    scores: Tensor  # [batch, nodes] log-probability of the path, ABSENT where there is none
    levels: int  # depth of the deepest


class VerifyTree(NamedTuple):
    tokens: Tensor  # [batch, slots] int64, slot 0 the root
    parents: Tensor  # [batch, slots] int64, -1 for the root and for empty slots


class TreeGrower:
    """Collects the candidates of one round, block by block."""

    def __init__(self, rule: BranchRule) -> None:
        self.rule = rule
        self.tokens: list[Tensor] = []  # per block [batch, candidates]
        self.parents: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.size = 0
        self.levels = 0  # depth of the deepest candidate
        self.shape = (0, 0, 0)  # of the last block: leaves, K, width
        self.starts: Tensor | None = None  # [batch, candidates of the last block] bool

    def add(self, found: Proposals, leaves: Leaves | None = None) -> None:
        """Take in the proposals of block 1, or of a later block for its `leaves`."""
        batch, count, size, width = found.tokens.shape
        kept, starts = _kept(self.rule, found, first=leaves is None)
        likeliest = found.log_probs[..., 0].cumsum(2)  # [batch, leaves, K]
        before = torch.cat([torch.zeros_like(likeliest[:, :, :1]), likeliest[:, :, :-1]], dim=2)
        scores = before.unsqueeze(3) + found.log_probs
        device = found.tokens.device
        place = torch.arange(count * size, device=device).view(1, count, size) * width + self.size
        parents = torch.empty(batch, count, size, dtype=torch.long, device=device)
        parents[:, :, 1:] = place[:, :, :-1]
        if leaves is None:
            parents[:, :, 0] = -1
        else:
            scores = scores + leaves.scores[:, :, None, None]
            parents[:, :, 0] = leaves.nodes
        self.tokens.append(found.tokens.flatten(1))
        self.parents.append(parents.unsqueeze(3).expand(-1, -1, -1, width).flatten(1))
        self.scores.append(torch.where(kept, scores, ABSENT).flatten(1))
        self.starts = (kept & starts.unsqueeze(3)).flatten(1)
        self.shape = (count, size, width)
        self.levels += size
        self.size += count * size * width

    def leaves(self, count: int) -> Leaves:
        """The `count` likeliest nodes of the last block that the next one may continue."""
        assert self.starts is not None
        scores = torch.where(self.starts, self.scores[-1], ABSENT)
        best = torch.sort(scores, dim=1, descending=True, stable=True)
        place = best.indices[:, :count]  # [batch, count] within the last block
        slots, width = self.shape[1], self.shape[2]
        first = self.size - scores.shape[1]
        return Leaves(
            nodes=place + first,
            source=place // (slots * width),
            slot=place // width % slots,
            tokens=self.tokens[-1].gather(1, place),
            scores=best.values[:, :count],
        )

    def join(self, others: Nodes) -> None:
        """Let other nodes compete; no block continues them."""
        self.levels = max(self.levels, others.levels)
        self.tokens.append(others.tokens)
        self.parents.append(torch.where(others.parents < 0, -1, others.parents + self.size))
        self.scores.append(others.scores)
        self.size += others.tokens.shape[1]
        self.starts = None

    def finish(self, roots: Tensor, slots: int) -> VerifyTree:
        """The tree of the likeliest candidates behind `roots` `[batch]`, duplicates merged."""
        tokens, parents = torch.cat(self.tokens, dim=1), torch.cat(self.parents, dim=1)
        scores = torch.cat(self.scores, dim=1)
        return VerifyTree(*host_op(best_tree_torch)(tokens, parents, scores, roots, slots, self.levels))


def best_tree_torch(
    tokens: Tensor, parents: Tensor, scores: Tensor, roots: Tensor, slots: int, levels: int
) -> VerifyTree:
    """The `slots - 1` best of `candidates` nodes, no two siblings with one token.

    tokens, parents, scores `[batch, candidates]`: a parent (-1: the root) stands before its children and
    scores at least as much; ABSENT scores mean "not there". Copies of a node give it their children and its
    best score. No candidate lies deeper than `levels`. Only the `4 * slots` best candidates are looked at,
    copies included.
    """
    batch, total = tokens.shape
    considered = min(total, 4 * slots)
    # Stable: among equals a parent stays before its children.
    order = torch.sort(scores, dim=1, descending=True, stable=True)
    index, score = order.indices[:, :considered], order.values[:, :considered]
    place = torch.full((batch, total + 1), -1, device=tokens.device)  # candidate -> its place in this order
    here = torch.arange(considered, device=tokens.device).expand(batch, -1)
    place.scatter_(1, index, here)
    token = tokens.gather(1, index)
    above = parents.gather(1, index)
    above = place.gather(1, torch.where(above < 0, total, above))  # [batch, considered], -1 for the root
    present = score > ABSENT
    stands_for = _merge(token, above, present, levels)
    kept = (stands_for == here) & present
    slot = torch.where(kept, kept.long().cumsum(1), 0)  # [batch, considered] slot of each kept node
    kept = kept & (slot < slots)
    parent_node = stands_for.gather(1, above.clamp_min(0))
    parent_slot = torch.where(above < 0, 0, slot.gather(1, parent_node))
    # What is not kept is written to a column that is cut off.
    target = torch.where(kept, slot, slots)
    out_tokens = torch.zeros(batch, slots + 1, dtype=torch.long, device=tokens.device)
    out_parents = torch.full((batch, slots + 1), -1, device=tokens.device)
    out_tokens.scatter_(1, target, token)
    out_parents.scatter_(1, target, parent_slot)
    out_tokens, out_parents = out_tokens[:, :slots].contiguous(), out_parents[:, :slots].contiguous()
    out_tokens[:, 0], out_parents[:, 0] = roots, -1
    return VerifyTree(out_tokens, out_parents)


def _merge(token: Tensor, above: Tensor, present: Tensor, levels: int) -> Tensor:
    """For every node `[batch, nodes]` the first one with the same token path from the root."""
    batch, nodes = token.shape
    here = torch.arange(nodes, device=token.device).expand(batch, -1)
    stands_for = here
    alike = (token.unsqueeze(2) == token.unsqueeze(1)) & present.unsqueeze(2) & present.unsqueeze(1)
    alike = alike | torch.eye(nodes, dtype=torch.bool, device=token.device)
    # Each pass settles one more level.
    for _ in range(levels):
        parent = torch.where(above < 0, -1, stands_for.gather(1, above.clamp_min(0)))
        same = alike & (parent.unsqueeze(2) == parent.unsqueeze(1))
        stands_for = same.to(torch.uint8).argmax(2)
    return stands_for


def _kept(rule: BranchRule, found: Proposals, first: bool) -> tuple[Tensor, Tensor]:
    """Which proposals become nodes `[batch, leaves, K, width]`, and which slots start the next block
    `[batch, leaves, K]`: those that branch, and the last one unless the rule gave up before."""
    table = torch.tensor(rule.children, device=found.classes.device)
    wanted = table[found.classes]  # [batch, leaves, K]
    if first:
        wanted[:, :, 0] = rule.beam
    gave_up = (wanted == 0).cummax(dim=2).values
    if rule.spare_sure:
        wanted = _spared(wanted, found.log_probs[..., 0].exp(), first)
    wanted = torch.where(gave_up, 1, wanted.clamp_min(1))
    proposal = torch.arange(found.tokens.shape[3], device=table.device)
    starts = wanted > 1
    starts[:, :, -1] |= ~gave_up[:, :, -1]
    return proposal < wanted.unsqueeze(3), starts


def _spared(wanted: Tensor, sure: Tensor, first: bool) -> Tensor:
    """The reference's confidence reduction; sure `[batch, leaves, K]` is the likeliest one's probability."""
    later = torch.where(sure >= 0.95, wanted.clamp_max(2), wanted)
    later = torch.where((sure >= 0.85) & (sure < 0.95), wanted.clamp_max(3), later)
    if not first:
        return later
    spared = later.clone()
    beam, top = wanted[:, :, 0], sure[:, :, 0]
    few = torch.where(top >= 0.9, 3, torch.where(top >= 0.8, 5, torch.where(top >= 0.6, 8, beam)))
    spared[:, :, 0] = torch.minimum(few, beam)
    return spared
