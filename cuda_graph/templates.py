"""Retrieval templates: which successors of successors are looked up, as a fixed tree of rank paths.

A rank path `(r1, .., rd)` stands for "the r1-th successor of the root, then the r2-th successor of that,
..". A template is a prefix-closed set of such paths (with a path come its parent and all its lower-ranked
siblings). The paper publishes the number of nodes per depth for 60 slots (Graft, table 7) but not the
paths; here they are grown best first under an assumed, or calibrated, chance that the target follows each
rank. Pure Python, no torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

RankPath = tuple[int, ...]

# Nodes per depth 1..9 for 60 slots: the whole envelope and what each pruned stage uses (Graft, table 7).
PAPER_ENVELOPE_COUNTS = (8, 16, 14, 11, 8, 7, 6, 5, 5)
PAPER_STAGE_COUNTS = (
    (8, 10, 8, 6, 5, 4, 4, 4, 3),
    (6, 7, 5, 4, 4, 3, 3, 2, 2),
    (4, 3, 3, 2, 2, 2, 2, 1, 1),
)


def assumed_rank_prior(width: int) -> tuple[float, ...]:
    """Chance that the target follows each of the first `width` ranks, before anything is calibrated."""
    return tuple(0.5 * (rank + 1) ** -1.5 for rank in range(width))


@dataclass(frozen=True)
class Template:
    """A prefix-closed set of rank paths, stored level by level."""

    paths: tuple[RankPath, ...]  # sorted by depth; within a depth, best first
    order: tuple[
        int, ...
    ]  # best-first position of each path over all depths: a parent's is below its child's

    @cached_property
    def fathers(self) -> tuple[int, ...]:
        """Index of each node's parent in `paths`, -1 for the root's children."""
        index = {path: node for node, path in enumerate(self.paths)}
        return tuple(index[path[:-1]] if len(path) > 1 else -1 for path in self.paths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank that each node reads in its parent's row."""
        return tuple(path[-1] for path in self.paths)

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Number of nodes at depth 1, 2, ..."""
        counts = Counter(len(path) for path in self.paths)
        return tuple(counts[depth] for depth in range(1, max(counts, default=0) + 1))

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @property
    def width(self) -> int:
        """Ranks in use: a table row must hold at least this many successors."""
        return 1 + max(self.ranks, default=-1)

    def best(self, num_nodes: int) -> tuple[bool, ...]:
        """Membership of the `num_nodes` best paths; nested, since they are a prefix of one order."""
        if not 0 <= num_nodes <= self.num_nodes:
            raise ValueError(
                f"the template has {self.num_nodes} nodes, {num_nodes} were asked for: enlarge it"
            )
        return tuple(position < num_nodes for position in self.order)

    def membership(self, paths: Collection[RankPath]) -> tuple[bool, ...]:
        """Which nodes are among `paths`."""
        return tuple(path in paths for path in self.paths)


def template_from_paths(paths: Sequence[RankPath]) -> Template:
    """The template of these paths, given best first.

    Raises ValueError when a path comes before its parent or its lower-ranked sibling, or twice.
    """
    seen: set[RankPath] = {()}
    for path in paths:
        needed = [path[:-1]] + ([(*path[:-1], path[-1] - 1)] if path[-1] else [])
        if path in seen or any(other not in seen for other in needed):
            raise ValueError(
                f"rank path {path} repeats or lacks one of {needed} before it: reorder the paths"
            )
        seen.add(path)
    by_level = sorted(range(len(paths)), key=lambda position: len(paths[position]))
    return Template(paths=tuple(paths[position] for position in by_level), order=tuple(by_level))


def template_for_budget(num_nodes: int, max_depth: int, rank_prior: Sequence[float]) -> Template:
    """The `num_nodes` likeliest rank paths of at most `max_depth` ranks.

    A path's chance is the product of its ranks' priors; ties go to the shorter, then the lower-ranked path.
    For one prior and depth, a smaller budget's template is part of every larger one's.

    Raises ValueError when no such template exists or the prior is not positive and non-increasing.
    """
    _check_prior(rank_prior)
    capacity = sum(len(rank_prior) ** depth for depth in range(1, max_depth + 1))
    if not 0 <= num_nodes <= capacity:
        limits = f"{len(rank_prior)} ranks and depth {max_depth} allow 0 to {capacity}"
        raise ValueError(
            f"a template of {num_nodes} nodes is impossible ({limits}): change the budget or depth"
        )
    paths: list[RankPath] = []
    frontier: list[tuple[float, int, RankPath]] = [(-rank_prior[0], 1, (0,))]
    while len(paths) < num_nodes:
        chance, depth, path = heapq.heappop(frontier)
        paths.append(path)
        if path[-1] + 1 < len(rank_prior):
            step = rank_prior[path[-1] + 1] / rank_prior[path[-1]]
            heapq.heappush(frontier, (chance * step, depth, (*path[:-1], path[-1] + 1)))
        if depth < max_depth:
            heapq.heappush(frontier, (chance * rank_prior[0], depth + 1, (*path, 0)))
    return template_from_paths(paths)


def paths_from_counts(
    counts: Sequence[int], rank_prior: Sequence[float], including: Collection[RankPath] = ()
) -> list[RankPath]:
    """Exactly `counts[d]` paths per depth, best first: those `including`, then the likeliest.

    Raises ValueError when a depth cannot offer that many or the prior is not positive and non-increasing.
    """
    _check_prior(rank_prior)
    chances: dict[RankPath, float] = {(): 1.0}
    level: list[RankPath] = [()]
    for depth, count in enumerate(counts, 1):
        children = {(*path, rank): chances[path] * p for path in level for rank, p in enumerate(rank_prior)}
        if count > len(children):
            raise ValueError(f"depth {depth} offers {len(children)} nodes, {count} asked for: ask for fewer")
        best_first = sorted(children, key=lambda path: (path not in including, -children[path], path))
        level = best_first[:count]
        chances.update({path: children[path] for path in level})
    del chances[()]
    return sorted(chances, key=lambda path: (-chances[path], len(path), path))


def paper_templates(rank_prior: Sequence[float]) -> tuple[Template, tuple[tuple[bool, ...], ...]]:
    """The 80-node envelope with the paper's per-depth counts, and the members of its three pruned stages.

    Each stage is grown from the next smaller one, so that they are nested whatever the prior.
    """
    stages: list[list[RankPath]] = []
    for counts in reversed((PAPER_ENVELOPE_COUNTS, *PAPER_STAGE_COUNTS)):
        stages.insert(0, paths_from_counts(counts, rank_prior, set(stages[0]) if stages else ()))
    envelope = template_from_paths(stages[0])
    return envelope, tuple(envelope.membership(set(stage)) for stage in stages[1:])


def _check_prior(rank_prior: Sequence[float]) -> None:
    falls = list(rank_prior) == sorted(rank_prior, reverse=True)
    if not rank_prior or not falls or not 0 < min(rank_prior) <= max(rank_prior) <= 1:
        raise ValueError(
            f"rank prior {tuple(rank_prior)} must lie in (0, 1] and never rise: refit or smooth it"
        )
