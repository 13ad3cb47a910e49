"""Verify at T > 0 by coupled sampling, on devices where the engine brings a sampling kernel of its own.

The engine goes on doing everything around it: penalties, grammar masks, temperature, top-k and top-p, and
the broadcast to the other ranks. Only its last step, which draws coins for the proposed tokens, is replaced:
every node draws the target's token with noise keyed by (seed, position), and the tree is walked by equality.
So seeded output does not depend on the tree. (The CPU platform has the same rule in ``cpu/verify.py``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..cuda_graph.coupled import parents_from_links, walk_accepted
from ..cuda_graph.race import race_tokens


@dataclass(frozen=True)
class Draws:
    """What one verify needs to know to draw its tokens."""

    seeds: torch.Tensor  # [batch] int64
    positions: torch.Tensor  # [batch * slots] int64, absolute position of each node
    min_ps: torch.Tensor | None  # [batch] float32, None when no request asks for min-p


# The engine calls its sampling kernel as a plain function, without the worker it runs for.
_current: Callable[[], Draws] | None = None


@contextmanager
def drawing(draws: Callable[[], Draws] | None) -> Iterator[None]:
    """Sample the verify inside this block by these draws; None leaves the engine's own rule."""
    global _current
    former, _current = _current, draws
    try:
        yield
    finally:
        _current = former


def sample_tree(
    original: Callable[..., None],
    predicts: torch.Tensor,  # [batch * slots] int32, written
    accept_index: torch.Tensor,  # [batch, max_path] int32, written
    accept_token_num: torch.Tensor,  # [batch] int32, written: accepted drafts, bonus not included
    candidates: torch.Tensor,  # [batch, slots]
    *args: Any,
    **kwargs: Any,
) -> None:
    """Around ``tree_speculative_sampling_target_only``, which the engine calls by keywords."""
    if _current is None:
        original(predicts, accept_index, accept_token_num, candidates, *args, **kwargs)
        return
    draws = _current()
    batch, slots = candidates.shape
    probs = kwargs["target_probs"].view(batch * slots, -1)
    seeds = draws.seeds.repeat_interleave(slots)
    tokens = race_tokens(probs, seeds, draws.positions.long(), _cuts(probs, draws.min_ps, slots))
    parents = parents_from_links(kwargs["retrive_next_token"], kwargs["retrive_next_sibling"])
    path = walk_accepted(candidates.long(), parents, tokens.view(batch, slots), accept_index.shape[1])
    predicts.copy_(path.predicts)
    accept_index.copy_(path.accept_index)
    accept_token_num.copy_(path.num_correct_drafts)


def _cuts(
    probs: torch.Tensor,  # [batch * slots, vocab]
    min_ps: torch.Tensor | None,  # [batch]
    slots: int,
) -> torch.Tensor:  # [batch * slots]
    """Smallest probability that survives min-p, which the engine's verify leaves out."""
    if min_ps is None:
        return probs.new_zeros(probs.shape[0])
    return probs.amax(1) * min_ps.repeat_interleave(slots)
