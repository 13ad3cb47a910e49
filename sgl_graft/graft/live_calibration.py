"""Calibrates a running server on its own traffic: what ``POST /graft/calibrate`` does.

For some rounds every candidate is counted, as for ``sgl-graft calibrate``; then maps and thresholds that fit
are put into use, in place. Nothing is written to disk.
"""

from __future__ import annotations

from typing import Any

import torch

from ..cuda_graph.value_rule import ValueMaps
from ..serving.ranks import Agree
from .calibration import Calibration, fit
from .collect import Collector
from .state import GraftState


class LiveCalibration:
    """One rank's.

    Args:
        state: whose maps and thresholds are fitted.
        target: name of the target.
        agree: gives every rank what rank 0 decided.
        captured: whether the draft runs as captured graphs, in which candidates cannot be counted.
    """

    def __init__(
        self,
        state: GraftState,
        target: str,
        agree: Agree,
        *,
        captured: bool,
    ) -> None:
        self._state = state
        self._target = target
        self._agree = agree
        self._captured = captured
        self._collector: Collector | None = None
        self._wanted = 0
        self._fitted_on = 0
        self._first_maps = ValueMaps(state.maps.x.clone(), state.maps.y.clone())
        self._first_thresholds = state.thresholds.clone()

    def start(self, rounds: int) -> None:
        """Count the next ``rounds`` verifies, a batch's being one; starts over when it was counting.

        Raises:
            ValueError: the draft runs as captured graphs, whose replays show no candidates.
        """
        state = self._state
        if self._captured:
            raise ValueError(
                "this server replays captured draft graphs, and what they propose cannot be counted: "
                "calibrate a server that was started with --cuda-graph-backend-decode=disabled, or run "
                "`sgl-graft calibrate`, and start this one with its file"
            )
        self._collector = Collector(state.chain, state.shape.vocab_size, state.root_buf.device)
        self._wanted = rounds
        state.on_commit = self._count

    def restore(self) -> None:
        """Return to what the server started with, and count no more."""
        self._stop()
        self._fitted_on = 0
        self._use(self._first_maps, self._first_thresholds)

    def status(self) -> dict[str, Any]:
        """How far it is; plain values."""
        counted = self._collector.rounds if self._collector is not None else 0
        return {
            "counting": self._collector is not None,
            "rounds_counted": counted,
            "rounds_wanted": self._wanted if self._collector is not None else 0,
            "fitted_on": self._fitted_on,
        }

    def _stop(self) -> None:
        self._collector = None
        self._state.on_commit = None

    def _count(self, committed: torch.Tensor, accept_lens: torch.Tensor) -> None:
        collector, state = self._collector, self._state
        assert collector is not None
        collector.record(*state.proposed, committed, accept_lens)
        if collector.rounds < self._wanted:
            return
        # All ranks counted the same rounds, so all are here now; they take rank 0's counts.
        fitted = self._agree(lambda: fit(collector.content(), self._target, "live traffic"))
        self._stop()
        self._fitted_on = fitted.rounds
        self._adopt(fitted)

    def _adopt(self, fitted: Calibration) -> None:
        state = self._state
        checkpoints = state.chain.stages.plan.checkpoints
        values = state.config.thresholds or fitted.thresholds_for(checkpoints)
        self._use(
            fitted.value_maps(state.maps.x.device),
            torch.tensor(values, dtype=torch.float32, device=state.thresholds.device),
        )

    def _use(self, maps: ValueMaps, thresholds: torch.Tensor) -> None:
        state = self._state
        state.thresholds.copy_(thresholds)
        if state.maps.x.shape == maps.x.shape:
            state.maps.x.copy_(maps.x)
            state.maps.y.copy_(maps.y)
        else:
            assert not self._captured, "start() refuses where maps cannot change their shape"
            state.maps = ValueMaps(maps.x.clone(), maps.y.clone())
