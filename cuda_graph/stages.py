"""Stage plans: how many draft nodes each stage of the gate keeps, and which retrieved nodes fill the rest.

Stage s is entered when the drafter's confidence fails at checkpoint s; the last stage is "all gates
passed". The paper's table for 60 slots (root included) keeps 8, 24, 40 or all 60 slots for the draft
(Graft, section 3.2); other slot counts get the same proportions. The root is counted on the draft's side,
so the verify width never changes. Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .templates import (
    PAPER_ENVELOPE_COUNTS,
    Template,
    assumed_rank_prior,
    paper_templates,
    template_for_budget,
)

PAPER_SLOTS = 60
PAPER_DRAFT_SLOTS = (
    8,
    24,
    40,
)  # of 60, root included, when the gate fails at the first, second, third checkpoint
PAPER_CHECKPOINTS = (0, 1, 5)  # for eight expansions after the root step
PAPER_EXPANSIONS = 8


@dataclass(frozen=True)
class StagePlan:
    """What the gate's outcome does to a tree of `slots` slots."""

    slots: int
    checkpoints: tuple[int, ...]  # draft depths where the gate looks, 0 = after the root step
    num_draft: tuple[int, ...]  # [stages], best draft nodes kept, root not counted
    members: tuple[tuple[bool, ...], ...]  # [stages][envelope nodes], retrieved nodes grafted
    envelope: Template
    backfill: bool = True  # freed slots go to the next best draft nodes

    @property
    def num_stages(self) -> int:
        return len(self.checkpoints) + 1

    @property
    def num_retrieved(self) -> tuple[int, ...]:
        return tuple(sum(member) for member in self.members)

    def prune_only(self) -> StagePlan:
        """The same gate and draft nodes with nothing grafted: the freed slots stay empty."""
        nothing = tuple((False,) * self.envelope.num_nodes for _ in self.members)
        return replace(self, members=nothing, backfill=False)


def scaled_checkpoints(steps: int) -> tuple[int, ...]:
    """The paper's checkpoints, scaled to a draft of `steps` levels; those that fall together are merged."""
    if steps < 1:
        raise ValueError(f"a draft has at least 1 step, not {steps}")
    scaled = {
        min(_round_half_up(depth * (steps - 1), PAPER_EXPANSIONS), steps - 1)
        for depth in PAPER_CHECKPOINTS[2:]
    }
    shallow = {depth for depth in PAPER_CHECKPOINTS[:2] if depth < steps}
    return tuple(sorted(shallow | scaled))


def paper_stage_plan(
    slots: int, steps: int, max_depth: int, rank_prior: Sequence[float] | None = None, min_envelope: int = 0
) -> StagePlan:
    """The paper's plan: its own counts at 60 slots and depth 9, its proportions elsewhere.

    `min_envelope` asks for at least that many retrieved nodes, members of no stage, for other users of the
    envelope. Raises ValueError when slots, steps or depth are out of range.
    """
    if slots < 1 or max_depth < 1:
        raise ValueError(f"slots and max_depth must be at least 1, not {slots} and {max_depth}")
    prior = rank_prior or assumed_rank_prior(8)
    checkpoints = scaled_checkpoints(steps)
    draft_slots = [max(1, _round_half_up(slots * part, PAPER_SLOTS)) for part in PAPER_DRAFT_SLOTS]
    num_draft = tuple(count - 1 for count in draft_slots[: len(checkpoints)]) + (slots - 1,)
    if (slots, max_depth) == (PAPER_SLOTS, len(PAPER_ENVELOPE_COUNTS)):
        envelope, stages = paper_templates(prior)
        members = (*stages[: len(checkpoints)], envelope.best(0))
        return StagePlan(slots, checkpoints, num_draft, members, envelope)
    num_retrieved = [slots - 1 - kept for kept in num_draft]
    envelope = template_for_budget(max(min_envelope, *num_retrieved), max_depth, prior)
    return custom_stage_plan(slots, steps, checkpoints, num_draft, num_retrieved, envelope)


def custom_stage_plan(
    slots: int,
    steps: int,
    checkpoints: Sequence[int],
    num_draft: Sequence[int],
    num_retrieved: Sequence[int],
    envelope: Template,
    backfill: bool = True,
) -> StagePlan:
    """A plan with these numbers: a fixed split, a root gate only, gates everywhere, retrieval only.

    Raises ValueError, naming the value and the remedy, for a table that cannot fill `slots`.
    """
    depths = list(checkpoints)
    if depths != sorted(set(depths)) or not all(0 <= depth < steps for depth in depths):
        raise ValueError(
            f"checkpoints {depths} must rise within 0..{steps - 1} (steps is {steps}): drop or move them"
        )
    stages = len(depths) + 1
    if len(num_draft) != stages or len(num_retrieved) != stages:
        raise ValueError(
            f"{len(depths)} checkpoints make {stages} stages, the stage table has "
            f"{len(num_draft)} draft and {len(num_retrieved)} retrieved counts: give one of each per stage"
        )
    if list(num_draft) != sorted(num_draft) or min(num_draft) < 0 or min(num_retrieved) < 0:
        raise ValueError(
            f"draft counts {list(num_draft)} must be at least 0 and never fall from stage to stage"
        )
    for stage, (kept, grafted) in enumerate(zip(num_draft, num_retrieved, strict=True)):
        if kept + grafted > slots - 1:
            raise ValueError(
                f"stage {stage} wants {kept} + {grafted} nodes, {slots} slots hold {slots - 1} and the root: "
                "lower one of the two or raise the slots"
            )
    members = tuple(envelope.best(count) for count in num_retrieved)
    return StagePlan(slots, tuple(depths), tuple(num_draft), members, envelope, backfill)


def _round_half_up(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
