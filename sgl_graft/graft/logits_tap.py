"""A look at the target's logits before penalties and grammar masks change them in place."""

from __future__ import annotations

from typing import Any

from ..cuda_graph.top_successors import TopSuccessors
from .state import GraftState


class LogitsTap:
    """Stands for the target worker during one verify, and looks at its logits while they are still raw."""

    best: TopSuccessors

    def __init__(self, worker: Any, state: GraftState) -> None:
        self._worker = worker
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def forward_batch_generation(self, *args: Any, **kwargs: Any) -> Any:
        output = self._worker.forward_batch_generation(*args, **kwargs)
        self.best = self._state.see(output.logits_output.next_token_logits)
        return output
