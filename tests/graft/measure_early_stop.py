"""How often drafts may stop early, replayed on recorded answers: the figures of `docs/measurements.md`, 2.11.

    python tests/graft/measure_early_stop.py runs/replay/answers.safetensors

Every round of every answer is drafted level by level. A batch may stop when all its requests may, so batches
of other sizes are drawn from the rounds of single requests.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Literal

import torch
from sgl_graft.cuda_graph.eagle_tree import DraftPool, pool_level_sizes

from sgl_graft import models
from sgl_graft.bench.recording import Recording
from sgl_graft.bench.replay import Calibrated, Replay, Setting
from sgl_graft.config import GraftConfig
from sgl_graft.cpu import tree_kernels
from sgl_graft.graft.calibration import FILE_NAME, Calibration, read_calibration
from sgl_graft.graft.early_stop import DraftLevels
from sgl_graft.graft.shape import GraftShape
from sgl_graft.graft.state import GraftState
from sgl_graft.graft.tenancy import Assignment

DRAWS = 20_000
Rule = Literal["value", "staged"]


class CountedReplay(Replay):
    """A replay that asks, in every round, after how many levels the draft may stop."""

    def __init__(self, rule: Rule, recording: Recording, calibration: Calibration) -> None:
        shape = recording.shape
        calibrated = Calibrated(calibration.value_maps(), dict(calibration.thresholds))
        super().__init__(Setting(rule, rule), shape, recording.vocab_size, calibrated)
        sizes = GraftShape(shape.slots, shape.topk, shape.steps, 1, recording.vocab_size)
        self.state = GraftState(GraftConfig(rule=rule), sizes, calibration)
        self.state.begin(0, Assignment(0))
        self.table = self.state.table
        self.levels: list[int] = []

    def _grow(
        self, pool: DraftPool, root: torch.Tensor, context: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.state.root_buf[0], self.state.context_buf[0] = root[0], context[0]
        rows = torch.tensor([0])
        draft = DraftLevels(self.state, rows, self.state.look_up(rows))
        for level, one in enumerate(levels_of(pool, self.chain.topk, self.chain.steps), start=1):
            if draft.add(*one) or level == self.chain.steps:
                self.levels.append(level)
                break
        return super()._grow(pool, root, context)


def levels_of(
    pool: DraftPool, topk: int, steps: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Scores, tokens and expanded nodes per level of a pool of one request, as `draft_forward` has them."""
    sizes = pool_level_sizes(topk, steps)
    families = pool.parents[:, ::topk]  # [1, 1 + topk * (steps - 1)], the expanded node of each family
    expanded = [families[:, : topk + 1], *families[:, topk + 1 :].split(topk, dim=1), families[:, :topk]]
    scores = [level.view(1, -1, topk) for level in pool.scores.split(sizes, dim=1)]
    return list(zip(scores, pool.tokens.split(sizes, dim=1), expanded, strict=False))


def report(rule: Rule, replay: CountedReplay, rng: random.Random) -> None:
    steps, levels = replay.chain.steps, replay.levels
    share = ", ".join(f"{level}: {levels.count(level) / len(levels):.1%}" for level in range(1, steps + 1))
    print(f"{rule}: {len(levels)} rounds; levels needed of {steps}: {share}")
    for size in (1, 2, 4, 8, 16):
        needed = [max(rng.choices(levels, k=size)) for _ in range(DRAWS)]
        stopped = sum(level < steps for level in needed) / DRAWS
        saved = sum(steps - level for level in needed) / DRAWS
        print(
            f"  concurrency {size:2}: {stopped:.1%} of rounds stop early, saving {saved:.2f} of {steps - 1}"
        )


def main(path: Path) -> None:
    torch.set_num_threads(1)
    tree_kernels.register()
    recording = Recording.load(path)
    calibration = read_calibration(
        models.path("smollm2-135m-instruct-eagle3") / FILE_NAME, recording.vocab_size
    )
    for rule in ("value", "staged"):
        replay = CountedReplay(rule, recording, calibration)
        replay.run_all(recording)
        report(rule, replay, random.Random(0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
