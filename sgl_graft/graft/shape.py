"""The sizes a GRAFT server fixes at start."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import GraftConfig
from ..cuda_graph.templates import assumed_rank_prior

# Steps, topk and slots of a tree that nobody chose. Every slot costs arithmetic on a CPU, and the successor
# table makes up for draft steps: the fastest of the trees measured there (docs/measurements.md, 2.3).
DEFAULT_TREE, CPU_TREE = (5, 4, 16), (2, 4, 8)
PAPER_DEPTH = 9  # levels of the paper's templates
# Retrieved candidates the value rule chooses from, at least; more only add rivals that rarely come true.
VALUE_ENVELOPE = 24


@dataclass(frozen=True)
class GraftShape:
    """Sizes of trees and tables.

    Attributes:
        slots: verify slots per request, root included.
        topk: beams per draft step.
        steps: draft steps.
        num_rows: rows of the engine's request pool.
        vocab_size: the target's vocabulary.
    """

    slots: int
    topk: int
    steps: int
    num_rows: int
    vocab_size: int

    def depth(self, asked: int | None) -> int:
        """Levels below the root a tree may have.

        Raises:
            ValueError: fewer levels than the draft has steps, or more than the slots can hold.
        """
        depth = max(self.steps, min(PAPER_DEPTH, self.slots - 1)) if asked is None else asked
        if not self.steps <= depth <= max(self.steps, self.slots - 1):
            raise ValueError(
                f"graft.depth is {depth}; it must be between the draft's {self.steps} steps and the "
                f"{self.slots - 1} nodes that fit into {self.slots} slots"
            )
        return depth


def rank_prior(config: GraftConfig) -> tuple[float, ...]:
    """Chance assumed for each rank when the template is laid out.

    The value rule chooses among the candidates later, so its envelope may bet on the deep copies that pay
    most; the staged rule verifies its template as it is.
    """
    width = config.table.row_width
    if config.rule == "staged":
        return assumed_rank_prior(width)
    return tuple(0.7 if rank == 0 else 0.15 * rank**-1.4 for rank in range(width))
