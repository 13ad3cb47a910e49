"""Our algorithm names, and the engine names they run under.

A name the engine knows keeps every feature the engine ties to it, so ``GRAFT`` is rewritten before
resolution and remembered in the environment, which child processes inherit.
"""

from __future__ import annotations

import os
from typing import Any

from .config import current_config

ALGORITHM_VARIABLE = "SGLGRAFT_ALGORITHM"


def selected_algorithm() -> str | None:
    """Our algorithm this server runs, or None when the engine's own was asked for."""
    return os.environ.get(ALGORITHM_VARIABLE) or None


def rewrite(server_args: Any) -> None:
    """Replace our algorithm name by the engine's.

    Raises:
        ValueError: the algorithm is not available in this release of sgl_graft.
    """
    name = (server_args.speculative_algorithm or "").upper()
    if name == "GRAFT":
        os.environ[ALGORITHM_VARIABLE] = name
        server_args.speculative_algorithm = current_config().graft.base
    elif name in ("BLOCKPILOT", "SPECBLOCK"):
        raise ValueError(
            f"--speculative-algorithm {name} is not part of this release of sgl_graft; "
            "use GRAFT, EAGLE3 or EAGLE."
        )
    else:
        os.environ.pop(ALGORITHM_VARIABLE, None)
