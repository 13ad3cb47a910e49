"""Calibration: gate thresholds for the `staged` rule, acceptance maps for the `value` rule.

A calibration file belongs to one draft and one target. It is a JSON document that
``sgl-graft calibrate`` writes; a packaged one lies beside the shipped draft.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..config import GraftConfig
from ..cuda_graph.value_rule import ValueMaps
from ..files import write_whole
from .counters import CandidateCounters
from .monotone import fit_rising
from .thresholds import fit_gates, fit_to_lengths

logger = logging.getLogger(__name__)

FILE_NAME = "graft_calibration.json"
FORMAT = 1
PAPER_THRESHOLDS = {0: 0.14, 1: 0.14, 5: 0.49}  # Qwen3-8B, means of the paper's table 11
NUM_KNOTS = 12


class Calibration(BaseModel):
    """What was fitted.

    Attributes:
        format: version of this document.
        target: name of the target it was fitted on.
        vocab_size: the target's vocabulary; another one is refused.
        map_x: knots per source and depth, log-spaced path probabilities. [2][depths][knots]
        map_y: acceptance probability at each knot. [2][depths][knots]
        thresholds: gate threshold per draft depth.
        auc: how well confidence at a depth tells drafts that go on from those that do not.
        rounds: rounds it was fitted on.
        measured_on: what those rounds were.
        steps: draft steps of those rounds.
        topk: branches per draft step of those rounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    target: str = ""
    vocab_size: int | None = None
    map_x: list[list[list[float]]] = []
    map_y: list[list[list[float]]] = []
    thresholds: dict[int, float] = {}
    auc: dict[int, float] = {}
    rounds: int = 0
    measured_on: str = ""
    steps: int | None = None
    topk: int | None = None

    @model_validator(mode="after")
    def _known_format(self) -> Calibration:
        if self.format != FORMAT:
            raise ValueError(
                f"calibration format {self.format}, this release reads {FORMAT}: calibrate again"
            )
        return self

    def value_maps(self, device: torch.device | str = "cpu") -> ValueMaps:
        """The acceptance maps; identity where nothing was fitted."""
        if not self.map_x:
            return ValueMaps.identity(1, device)
        maps = ValueMaps(
            torch.tensor(self.map_x, dtype=torch.float32, device=device),
            torch.tensor(self.map_y, dtype=torch.float32, device=device),
        )
        maps.check()
        return maps

    def thresholds_for(self, checkpoints: tuple[int, ...]) -> tuple[float, ...]:
        """Threshold of each gate; the paper's nearest one where nothing was fitted."""

        def nearest(depth: int) -> float:
            return PAPER_THRESHOLDS[min(PAPER_THRESHOLDS, key=lambda known: abs(known - depth))]

        return tuple(self.thresholds.get(depth, nearest(depth)) for depth in checkpoints)


def read_calibration(path: Path, vocab_size: int) -> Calibration:
    """Read a calibration file.

    Raises:
        ValueError: it is missing, damaged, of another format, or of another vocabulary.
    """
    remedy = "run `sgl-graft calibrate` for this draft and target, or leave graft.calibration out"
    try:
        calibration = Calibration.model_validate_json(path.read_text())
        calibration.value_maps()
    except (OSError, ValidationError, ValueError) as error:
        raise ValueError(f"calibration file {path} cannot be used: {error}; {remedy}") from error
    if calibration.vocab_size not in (None, vocab_size):
        raise ValueError(
            f"calibration file {path} is for a vocabulary of {calibration.vocab_size}, the target has "
            f"{vocab_size}; {remedy}"
        )
    return calibration


def load_calibration(config: GraftConfig, draft_path: str | None, vocab_size: int) -> Calibration:
    """The file the configuration names, else the one beside the draft, else none."""
    if config.calibration is not None:
        return read_calibration(config.calibration, vocab_size)
    packaged = Path(draft_path or "") / FILE_NAME
    if packaged.is_file():
        return read_calibration(packaged, vocab_size)
    logger.warning(
        "GRAFT runs uncalibrated: no %s beside the draft; `sgl-graft calibrate` makes one", FILE_NAME
    )
    return Calibration()


def fit(counters: dict[str, Any], target: str, measured_on: str) -> Calibration:
    """The calibration that a collector's counters ask for.

    Args:
        counters: ``Collector.content()``, or that of a replay, which also knows each stage's tree.
        target: name of the target.
        measured_on: what was served, in words.
    """
    map_x, map_y = fit_maps(counters)
    gates = fit_gates(*counters["gates"])
    thresholds = {gate.depth: gate.threshold for gate in gates}
    if staged := counters.get("staged"):
        fitted = fit_to_lengths(staged["confidence"], staged["lengths"])
        thresholds |= {d: round(t, 4) for d, t in zip(staged["checkpoints"], fitted, strict=True)}
    return Calibration(
        target=target,
        vocab_size=counters["vocab_size"],
        map_x=map_x,
        map_y=map_y,
        thresholds=thresholds,
        auc={gate.depth: round(gate.auc, 4) for gate in gates},
        rounds=counters["rounds"],
        measured_on=measured_on,
        steps=counters["steps"],
        topk=counters["topk"],
    )


def fit_maps(counters: dict[str, Any]) -> tuple[list, list]:
    """Acceptance maps from candidate counters: a rising fit of hit rate over log-probability bins.

    Args:
        counters: ``seen`` and ``true``, each [2][depths][bins].

    Returns:
        knots and values, each [2][depths][NUM_KNOTS]; a cell without data takes the depth above it.
    """
    bins = CandidateCounters.NUM_BINS
    edges = torch.linspace(CandidateCounters.LOWEST_LOG_PROB, 0.0, bins + 1)
    centres = ((edges[:-1] + edges[1:]) / 2).tolist()
    picks = torch.linspace(0, bins - 1, NUM_KNOTS).round().long().tolist()
    xs: list = []
    ys: list = []
    for seen, true in zip(counters["seen"], counters["true"], strict=True):
        depth_x: list = []
        depth_y: list = []
        for count, hits in zip(seen, true, strict=True):
            if sum(count) == 0 and depth_x:
                depth_x.append(depth_x[-1])
                depth_y.append(depth_y[-1])
                continue
            # One pseudo-candidate at the map's own probability keeps empty bins sane.
            prior = [float(torch.tensor(centre).exp()) for centre in centres]
            rates = [(h + p) / (c + 1.0) for h, p, c in zip(hits, prior, count, strict=True)]
            fitted = fit_rising(rates, [c + 1.0 for c in count])
            depth_x.append([prior[i] for i in picks])
            depth_y.append([fitted[i] for i in picks])
        xs.append(depth_x)
        ys.append(depth_y)
    return xs, ys


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file whole or not at all."""
    write_whole(path, json.dumps(calibration.model_dump(), indent=1) + "\n")
