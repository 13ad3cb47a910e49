"""Chooses our worker; kept apart from it because importing the worker is slow in the HTTP process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..algorithms import selected_algorithm
from ..patches import apply
from ..plugin import patches_of


def select_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """Around ``SpeculativeAlgorithm.create_worker``: our worker where one of our algorithms was asked for."""
    stock_worker = original(algorithm, server_args)
    if selected_algorithm() == "BLOCKPILOT":
        apply(patches_of("blockpilot", "serving", stage="worker"))
        from ..blockpilot.worker import BlockPilotWorker

        return BlockPilotWorker
    if selected_algorithm() != "GRAFT":
        return stock_worker
    apply(patches_of("graft", "serving", stage="worker"))
    from .worker import GraftWorker

    return GraftWorker
