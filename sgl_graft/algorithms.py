"""Our algorithm names, and the engine names they run under.

A name the engine knows keeps every feature the engine ties to it, so ours are rewritten before
resolution and remembered in the environment, which child processes inherit. SPECBLOCK has no such name: it
is registered with the engine under its own.
"""

from __future__ import annotations

import os
from typing import Any

from .config import current_config

ALGORITHM_VARIABLE = "SGLGRAFT_ALGORITHM"


def selected_algorithm() -> str | None:
    """Our algorithm this server runs, or None when the engine's own was asked for."""
    return os.environ.get(ALGORITHM_VARIABLE) or None


def register_selected() -> None:
    """Make SPECBLOCK known to the engine in this process, where it was asked for."""
    if selected_algorithm() == "SPECBLOCK":
        from .specblock.algorithm import register

        register()


def rewrite(server_args: Any) -> None:
    """Replace our algorithm name by the engine's, or make it known to the engine."""
    name = (server_args.speculative_algorithm or "").upper()
    if name == "GRAFT":
        os.environ[ALGORITHM_VARIABLE] = name
        server_args.speculative_algorithm = current_config().graft.base
    elif name == "BLOCKPILOT":
        os.environ[ALGORITHM_VARIABLE] = name
        server_args.speculative_algorithm = "DFLASH"
    elif name == "SPECBLOCK":
        os.environ[ALGORITHM_VARIABLE] = name
        register_selected()
    else:
        os.environ.pop(ALGORITHM_VARIABLE, None)
