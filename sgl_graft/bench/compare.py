"""Variants held against each other by a paired bootstrap over prompts."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from sgl_graft.bench.records import CellRecord, RequestRecord

NUM_RESAMPLES = 4000
NOISE_FLOOR = 0.98  # "within noise": the 95% lower bound of the ratio is at least this
BOOTSTRAP_SEED = 20261130


class Ratio(NamedTuple):
    value: float
    low: float  # 95% interval
    high: float

    @property
    def within_noise(self) -> bool:
        return self.low >= NOISE_FLOOR


def ratio_of_sums(
    numerators: tuple[np.ndarray, np.ndarray], denominators: tuple[np.ndarray, np.ndarray]
) -> Ratio:
    """Ratio, second over first, of sum(numerator) / sum(denominator).

    Entry i of every array is prompt i: both sides are resampled together, so an easy prompt is easy for both.
    """
    num = np.stack(numerators)  # [2, prompts]
    den = np.stack(denominators)
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    num_prompts = num.shape[1]
    picks = generator.integers(num_prompts, size=(NUM_RESAMPLES, num_prompts))
    rates = num[:, picks].sum(-1) / den[:, picks].sum(-1)  # [2, resamples]
    low, high = np.percentile(rates[1] / rates[0], [2.5, 97.5])
    whole = num.sum(-1) / den.sum(-1)
    return Ratio(float(whole[1] / whole[0]), float(low), float(high))


Group = dict[tuple[str, int], list[RequestRecord]]  # (data set, prompt) -> one record per repeat


def compare_variants(records: Iterable[CellRecord], variants: Sequence[str]) -> list[dict[str, Any]]:
    """Every later variant over every earlier one, per temperature and concurrency, all files and each.

    Speed is tokens over request seconds: with a fixed number of requests in flight it is proportional to
    throughput, but belongs to single prompts. Repeats enter as each prompt's median latency.
    """
    cells: dict[tuple[float, int], dict[str, Group]] = {}
    datasets: dict[str, None] = {}
    for record in records:
        datasets.setdefault(record.cell.dataset)
        settings = cells.setdefault((record.cell.temperature, record.cell.concurrency), {})
        group = settings.setdefault(record.cell.variant, {})
        for request in record.requests:
            group.setdefault((record.cell.dataset, request.index), []).append(request)
    results = []
    for (temperature, concurrency), by_variant in cells.items():
        for base, other in combinations(variants, 2):
            if base not in by_variant or other not in by_variant:
                continue
            for dataset in (None, *datasets):
                pair = _paired(by_variant[base], by_variant[other], dataset)
                for metric, ratio in _ratios(pair).items():
                    results.append(
                        {
                            "variant": other,
                            "over": base,
                            "dataset": dataset or "all",
                            "temperature": temperature,
                            "concurrency": concurrency,
                            "metric": metric,
                            "num_prompts": len(pair),
                            "ratio": round(ratio.value, 4),
                            "low": round(ratio.low, 4),
                            "high": round(ratio.high, 4),
                            "within_noise": ratio.within_noise,
                        }
                    )
    return results


Pair = tuple[list[RequestRecord], list[RequestRecord]]


def _paired(base: Group, other: Group, dataset: str | None) -> list[Pair]:
    return [
        (base[key], other[key])
        for key in sorted(base)
        if key in other and (dataset is None or key[0] == dataset)
    ]


def _ratios(pair: Sequence[Pair]) -> dict[str, Ratio]:
    if not pair:
        return {}
    ratios = {"tokens_per_s": ratio_of_sums(_columns(pair, _num_tokens), _columns(pair, _seconds))}
    # An answer of one token is the prefill's: it has no verify to average over.
    verified = [sides for sides in pair if all(_num_verifies(side) > 0 for side in sides)]
    if verified:
        columns = _columns(verified, _num_verified), _columns(verified, _num_verifies)
        ratios["accept_length"] = ratio_of_sums(*columns)
    return ratios


def _columns(pair: Sequence[Pair], of: Any) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array([of(sides[i]) for sides in pair], dtype=float) for i in (0, 1))  # type: ignore[return-value]


def _num_tokens(repeats: Sequence[RequestRecord]) -> float:
    return float(np.mean([len(request.output_ids) for request in repeats]))


def _seconds(repeats: Sequence[RequestRecord]) -> float:
    return float(np.median([request.latency_ms for request in repeats])) / 1000


def _num_verified(repeats: Sequence[RequestRecord]) -> float:
    return float(np.mean([len(request.output_ids) - 1 for request in repeats]))


def _num_verifies(repeats: Sequence[RequestRecord]) -> float:
    return float(np.mean([request.num_verifies or 0 for request in repeats]))
