"""One round of drafting: block 1 is there already, later blocks continue it, the best nodes make the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import SpecBlockDraft
from .rounds import Continuation
from .tree import ABSENT, BranchRule, Nodes, Proposals, TreeGrower, VerifyTree


@dataclass(frozen=True)
class DraftShape:
    """`blocks` chained blocks, each after the first behind the `leaves` best nodes; a tree of `slots`."""

    blocks: int
    leaves: int
    slots: int


@dataclass
class BlockOne:
    """What block 1 proposed at each request's last committed row."""

    hidden: Tensor  # [batch, K, hidden] before the final norm
    tokens: Tensor  # [batch, K, width] target token ids
    log_probs: Tensor  # [batch, K, width]
    classes: Tensor  # [batch, K]


class Drafter:
    """A draft with what it needs to speak the target's language."""

    def __init__(
        self, draft: SpecBlockDraft, embedding: Tensor, draft_to_target: Tensor, rule: BranchRule
    ) -> None:
        """embedding `[vocab, hidden]` is the target's; draft_to_target `[draft_vocab]`. `look_up`, tokens
        `[..]` to `[.., hidden]`, may be replaced where ranks share the embedding."""
        self.draft, self.rule = draft, rule
        self.draft_to_target = draft_to_target
        self.width = min(rule.width, len(draft_to_target))
        self.propose = draft.propose
        self.look_up: Callable[[Tensor], Tensor] = embedding.__getitem__

    def embed(self, tokens: Tensor) -> Tensor:
        return self.look_up(tokens).to(self.draft.norm.weight.dtype)

    def read(self, hidden: Tensor) -> BlockOne:
        """What block 1's output `[batch, K, hidden]` proposes."""
        ids, log_probs, classes = self.propose(hidden, self.width)
        return BlockOne(hidden, self.draft_to_target[ids], log_probs, classes)

    def tree(
        self,
        first: BlockOne,
        roots: Tensor,
        positions: Tensor,
        continuation: Continuation,
        shape: DraftShape,
        blocks: Sequence[int] | None = None,
        others: Nodes | None = None,
    ) -> VerifyTree:
        """Grow the trees of a batch.

        roots `[batch]` the last committed tokens; positions `[batch]` of the last rows with features;
        continuation runs the later blocks behind those rows; blocks: per request how many it may have, None
        for all of `shape.blocks`; others: nodes that compete with the draft's.
        """
        most = shape.blocks if blocks is None else max(blocks)
        grower = TreeGrower(self.rule)
        unsqueezed = (first.tokens, first.log_probs, first.classes)
        grower.add(Proposals(*(t.unsqueeze(1) for t in unsqueezed)))
        hidden = first.hidden.unsqueeze(1)  # [batch, leaves of the last block, K, hidden]
        batch = len(roots)
        row = torch.arange(batch, device=roots.device).unsqueeze(1)
        for number in range(1, most):
            leaves = grower.leaves(shape.leaves)
            if blocks is not None:
                allowed = torch.tensor([b > number for b in blocks], device=roots.device).unsqueeze(1)
                leaves = leaves._replace(scores=torch.where(allowed, leaves.scores, ABSENT))
            count = leaves.nodes.shape[1]
            source = None if number == 1 else (leaves.source + row * hidden.shape[1]).flatten()
            condition = hidden[row, leaves.source, leaves.slot].flatten(0, 1)
            hidden = continuation.next(
                source,
                (leaves.slot + 1).flatten(),
                condition,
                self.embed(leaves.tokens.flatten()),
                positions.repeat_interleave(count),
            ).unflatten(0, (batch, count))
            found = self.read(hidden)
            grower.add(Proposals(found.tokens, found.log_probs, found.classes), leaves)
        if others is not None:
            grower.join(others)
        return grower.finish(roots, shape.slots)
