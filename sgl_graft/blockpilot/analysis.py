"""What labels say, and what a choice of sizes is worth: everything in a policy's report.

All figures are computed from one matrix ``value`` [prompts, sizes] (accept length, or tokens per second),
larger is better. The gain of a choice is its mean value over the best fixed size's, minus 1; the oracle's
gain is what perfect knowledge would bring, and is biased upward because it is a maximum over noisy values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % bootstrap interval over prompts."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class LabelStatistics:
    """What the paper reports of its labels.

    Attributes:
        histogram: prompts by best size.
        within: share of prompts whose best size is within 1, 2, 3 of the default.
        not_default: share whose best size is not the default.
        loss_by_distance: mean relative loss of a size against the best, by distance between the two.
        median_advantage: median gain of the best size over the default, where they differ.
    """

    histogram: dict[int, int]
    within: dict[int, float]
    not_default: float
    loss_by_distance: dict[int, float]
    median_advantage: float


def label_statistics(
    value: Tensor,  # [prompts, sizes]
    labels: Tensor,  # [prompts] column of the best size
    sizes: Sequence[int],
    default: int,
) -> LabelStatistics:
    best = torch.tensor(sizes)[labels]
    distance = (best - default).abs()
    share = {d: float((distance <= d).double().mean()) for d in (1, 2, 3)}
    top = value.gather(1, labels.unsqueeze(1))
    loss = 1.0 - value / top
    apart = (torch.tensor(sizes).unsqueeze(0) - best.unsqueeze(1)).abs()
    by_distance = {int(d): float(loss[apart == d].mean()) for d in apart.unique()}
    other = distance > 0
    start = value[:, list(sizes).index(default)]
    advantage = (top.squeeze(1) / start - 1.0)[other]
    counts = Counter(best.tolist())
    return LabelStatistics(
        histogram={size: counts.get(size, 0) for size in sizes},
        within=share,
        not_default=float(other.double().mean()),
        loss_by_distance=by_distance,
        median_advantage=float(advantage.median()) if bool(other.any()) else 0.0,
    )


@dataclass(frozen=True)
class Verdict:
    """A choice of sizes on held-out prompts.

    Attributes:
        best_fixed: the fixed size with the highest mean on these prompts.
        means: mean value of every fixed size, the oracle and the choice.
        gain: of the choice over the best fixed size.
        oracle_gain: of the oracle over the best fixed size.
        fraction: of the oracle's gain that the choice reaches.
        recommended: whether the interval of the gain lies above 0.
    """

    best_fixed: int
    means: dict[str, float]
    gain: Interval
    oracle_gain: float
    fraction: Interval
    recommended: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bootstrap_rows(
    count: int, resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Tensor:  # [resamples, count] row numbers
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count, (resamples, count), generator=generator)


def _interval(mean: float, samples: Tensor) -> Interval:
    low, high = torch.quantile(samples, torch.tensor([0.025, 0.975], dtype=samples.dtype)).tolist()
    return Interval(mean, low, high)


def judge(
    value: Tensor,  # [prompts, sizes] float64, held-out prompts
    chosen: Tensor,  # [prompts] column each prompt was given
    sizes: Sequence[int],
    seed: int = 0,
) -> Verdict:
    """Compare a choice with every fixed size and the oracle.

    The best fixed size is chosen anew in every resample, as it would be by whoever picks it on such data;
    the choice must beat it all the same.
    """
    value = value.double()
    got = value.gather(1, chosen.unsqueeze(1)).squeeze(1)
    oracle = value.amax(dim=1)
    rows = bootstrap_rows(value.shape[0], seed=seed)
    fixed_means = value[rows].mean(dim=1).amax(dim=1)  # [resamples]
    gains = got[rows].mean(dim=1) / fixed_means - 1.0
    oracle_gains = oracle[rows].mean(dim=1) / fixed_means - 1.0
    fixed = value.mean(dim=0)
    best = int(fixed.argmax())
    gain = float(got.mean() / fixed[best]) - 1.0
    oracle_gain = float(oracle.mean() / fixed[best]) - 1.0
    # Where every size is as good there is nothing to gain, and no fraction of it.
    fractions = torch.where(oracle_gains > 1e-9, gains / oracle_gains.clamp(min=1e-9), 0.0)
    interval = _interval(gain, gains)
    means = {str(size): float(mean) for size, mean in zip(sizes, fixed, strict=True)}
    return Verdict(
        best_fixed=sizes[best],
        means=means | {"oracle": float(oracle.mean()), "choice": float(got.mean())},
        gain=interval,
        oracle_gain=oracle_gain,
        fraction=_interval(gain / oracle_gain if oracle_gain > 1e-9 else 0.0, fractions),
        recommended=interval.low > 0.0,
    )


def majority_choice(
    train_labels: Tensor,  # [train prompts] column
    train_groups: Sequence[str],
    groups: Sequence[str],
) -> Tensor:  # [len(groups)] column
    """Baseline: everyone gets the commonest best size of its data set among the training prompts."""
    overall = int(torch.mode(train_labels).values)
    by_group: dict[str, int] = {}
    for group in set(train_groups):
        own = train_labels[torch.tensor([g == group for g in train_groups])]
        by_group[group] = int(torch.mode(own).values)
    return torch.tensor([by_group.get(group, overall) for group in groups])


def split_by_prompt(
    prompts: Sequence[str], held_out: float = 0.3, seed: int = 0
) -> tuple[Tensor, Tensor]:  # row numbers
    """Rows to train on and rows to hold out; all runs of a prompt are on one side."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(prompts), generator=generator)
    cut = max(1, round(len(prompts) * held_out))
    return order[cut:].sort().values, order[:cut].sort().values
