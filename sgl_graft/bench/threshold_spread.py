"""How far gate thresholds fitted on one kind of prompt serve another: a measurement, nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sgl_graft.bench.recording import Answer, Recording
from sgl_graft.bench.replay import Calibrated, Setting, replay, stage_plan
from sgl_graft.cuda_graph.eagle_tree import DraftPool, pool_depths
from sgl_graft.cuda_graph.gate import path_confidence
from sgl_graft.cuda_graph.value_rule import DRAFT, ValueMaps
from sgl_graft.graft.collect import GateCounters
from sgl_graft.graft.counters import CandidateCounters
from sgl_graft.graft.thresholds import GateFit, fit_gates


def threshold_spread(
    fitted_on: Recording, tested_on: Recording, rows: tuple[int, int], slots: int = 16
) -> dict[str, Any]:
    """Fit on rows `rows[0]` to `rows[1]` (counted from 1) of each data set, test on every data set.

    Raises ValueError when rows of the two overlap or a data set has none to fit on.
    """
    first, last = rows
    overlap = {index for _, index in tested_on.names if first <= index + 1 <= last}
    if overlap:
        raise ValueError(f"rows {first} to {last} are fitted on, but row {min(overlap) + 1} is tested on")
    checkpoints = stage_plan(Setting("staged", "staged", slots), tested_on.shape.steps).checkpoints
    fits: dict[str, dict[int, GateFit]] = {}
    for name in _datasets(tested_on):
        part = _only(fitted_on, name, range(first - 1, last))
        if not part.answers:
            raise ValueError(f"nothing to fit on: rows {first} to {last} of {name} were not recorded")
        fits[name] = {gate.depth: gate for gate in gates_of(part.answers, part.shape.topk, part.shape.steps)}
    every = {name: {d: gate.threshold for d, gate in gates.items()} for name, gates in fits.items()}
    lengths = {
        tested: {
            fitted: _accept_length(_only(tested_on, tested), thresholds, slots)
            for fitted, thresholds in every.items()
        }
        for tested in fits
    }
    losses = {
        (tested, fitted): 1 - length / by_fit[tested]
        for tested, by_fit in lengths.items()
        for fitted, length in by_fit.items()
        if fitted != tested
    }
    thresholds = {name: {d: of_file[d] for d in checkpoints} for name, of_file in every.items()}
    return {
        "checkpoints": list(checkpoints),
        "thresholds": thresholds,
        "auc": {name: {d: round(gates[d].auc, 3) for d in checkpoints} for name, gates in fits.items()},
        "spread": {d: _range([of_file[d] for of_file in thresholds.values()]) for d in checkpoints},
        "accept_length": lengths,
        "mean_loss": sum(losses.values()) / len(losses),
        "worst_loss": max(losses.values()),
    }


def gates_of(answers: Sequence[Answer], topk: int, steps: int) -> list[GateFit]:
    """The gates that fit these answers, every position a root."""
    gates = GateCounters.create(steps)
    depths = torch.tensor(pool_depths(topk, steps))
    for answer in answers:
        pool = DraftPool(answer.pool_tokens, answer.pool_parents, answer.pool_scores)
        ahead = torch.nn.functional.pad(answer.tokens[1:], (0, steps), value=-1).unfold(0, steps, 1)
        lens = torch.arange(len(answer.tokens) - 1, -1, -1).clamp(max=steps)  # tokens known after each root
        counters = CandidateCounters.create(steps)
        right = counters.record_level_order(
            DRAFT, pool.tokens, pool.parents, pool.scores, depths, ahead, lens
        )
        gates.record(path_confidence(pool.scores, topk, steps), right, lens)
    return fit_gates(*gates.seen.tolist())


def _accept_length(recording: Recording, thresholds: dict[int, float], slots: int) -> float:
    calibrated = Calibrated(ValueMaps.identity(1), thresholds)
    rows = replay(Setting("staged", "staged", slots), recording, calibrated)
    return sum(row.num_tokens for row in rows) / sum(row.num_rounds for row in rows)


def _datasets(recording: Recording) -> list[str]:
    return list(dict.fromkeys(name for name, _ in recording.names))


def _only(recording: Recording, dataset: str, rows: range | None = None) -> Recording:
    kept = [
        place
        for place, (name, index) in enumerate(recording.names)
        if name == dataset and (rows is None or index in rows)
    ]
    names = tuple(recording.names[place] for place in kept)
    return replace(recording, names=names, answers=tuple(recording.answers[place] for place in kept))


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


def markdown(result: dict[str, Any]) -> str:
    """Thresholds by file, and what foreign ones cost."""
    depths = result["checkpoints"]
    head = ["file", *(f"threshold, depth {d} (AUC)" for d in depths), "own", "foreign: mean, worst"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, thresholds in result["thresholds"].items():
        own = result["accept_length"][name][name]
        foreign = [length for other, length in result["accept_length"][name].items() if other != name]
        gates = [f"{thresholds[d]:.2f} ({result['auc'][name][d]:.2f})" for d in depths]
        mean = sum(foreign) / len(foreign)
        lines.append(
            "| " + " | ".join([name, *gates, f"{own:.3f}", f"{mean:.3f}, {min(foreign):.3f}"]) + " |"
        )
    spread = [f"{result['spread'][d]:.2f}" for d in depths]
    lines.append("| spread | " + " | ".join([*spread, "", ""]) + " |")
    lines.append("")
    lines.append(f"Loss: {result['mean_loss']:.1%} on average, {result['worst_loss']:.1%} at worst.")
    return "\n".join(lines) + "\n"
