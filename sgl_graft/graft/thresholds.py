"""Gate thresholds of the `staged` rule. The paper publishes its own but not how they were found.

A replay knows what every stage's tree would have accepted in each round, and `fit_to_lengths` chooses what
accepts most. A server only knows how far its drafts were right: `fit_gates` takes the confidence that
separates best the drafts that go on from those that do not (Youden's J). Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class GateFit:
    """One depth's gate."""

    depth: int
    threshold: float
    auc: float  # chance that a draft that goes on is more confident than one that does not
    rounds: int
    share: float  # of rounds in which the draft was right beyond this depth


def fit_gates(
    stopped: Sequence[Sequence[int]],  # [steps][bins] rounds that went no further, by confidence
    went_on: Sequence[Sequence[int]],  # [steps][bins]
) -> list[GateFit]:
    """A gate per depth; depths where only one thing ever happened have none."""
    fits = []
    for depth, (low, high) in enumerate(zip(stopped, went_on, strict=True)):
        if sum(low) and sum(high):
            threshold, rounds = best_threshold(low, high), sum(low) + sum(high)
            fits.append(GateFit(depth, threshold, auc(low, high), rounds, sum(high) / rounds))
    return fits


def fit_to_lengths(
    confidence: Sequence[Sequence[float]],  # [rounds][checkpoints]
    lengths: Sequence[Sequence[int]],  # [rounds][stages] accepted by each stage's tree, the last unpruned
) -> list[float]:
    """A threshold per checkpoint, the deepest first: stop where stopping accepted more than going on."""
    going_on = [row[-1] for row in lengths]
    thresholds: list[float] = []
    for stage in reversed(range(len(confidence[0]))):
        order = sorted(range(len(confidence)), key=lambda i: confidence[i][stage])
        gains = [0, *accumulate(lengths[i][stage] - going_on[i] for i in order)]
        stopped = max(range(len(gains)), key=lambda count: gains[count])
        edges = [0.0, *(confidence[i][stage] for i in order), 1.0]
        threshold = 0.0 if stopped == 0 else (edges[stopped] + edges[stopped + 1]) / 2
        thresholds.insert(0, threshold)
        going_on = [
            going_on[i] if confidence[i][stage] > threshold else lengths[i][stage]
            for i in range(len(going_on))
        ]
    return thresholds


def best_threshold(stopped: Sequence[int], went_on: Sequence[int]) -> float:
    """The bin edge in 0..1 above which most of what goes on lies and least of what stops."""
    bins = len(stopped)
    below_stopped = [0, *accumulate(stopped)]
    below_went_on = [0, *accumulate(went_on)]
    gains = [
        low / below_stopped[-1] - high / below_went_on[-1]
        for low, high in zip(below_stopped, below_went_on, strict=True)
    ]
    return max(range(bins + 1), key=lambda edge: gains[edge]) / bins


def auc(stopped: Sequence[int], went_on: Sequence[int]) -> float:
    """Area under the receiver operating characteristic of two histograms; ties count half."""
    below, area = 0, 0.0
    for low, high in zip(stopped, went_on, strict=True):
        area += high * (below + low / 2)
        below += low
    return area / (sum(stopped) * sum(went_on))
