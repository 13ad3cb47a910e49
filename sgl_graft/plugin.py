"""The one entry point SGLang calls, in every process, before it parses its arguments.

SGLang logs and swallows a plugin's exception. A contract that is broken while something of ours is asked
for must stop the server, so it is raised as :class:`SystemExit`, which SGLang lets through.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version

from .patches import ContractError, Patch, register, require, table_for

logger = logging.getLogger(__name__)

DISABLE_VARIABLE = "SGLGRAFT_DISABLE"
ALGORITHMS = ("GRAFT", "BLOCKPILOT", "SPECBLOCK")
FEATURES = ("graft", "blockpilot", "serving", "penalties")  # of the patch table, where ours is asked for


def disabled() -> bool:
    """Whether the user switched sgl_graft off for this process and its children."""
    return os.environ.get(DISABLE_VARIABLE, "") not in ("", "0")


def selected() -> bool:
    """Whether this process was asked for something that is ours: on its command line, or by its parent."""
    from .algorithms import selected_algorithm
    from .config import CONFIG_VARIABLE

    if CONFIG_VARIABLE in os.environ or selected_algorithm():
        return True
    words = [word.upper() for argument in sys.argv[1:] for word in argument.split("=")]
    return "--GRAFT-CONFIG" in words or any(name in words for name in ALGORITHMS)


def patches_of(*features: str, stage: str | None = None) -> list[Patch]:
    """The patches of the installed release that belong to any of ``features``.

    Raises:
        ContractError: the installed release has no patch table.
    """
    table = table_for(version("sglang"))
    return [p for p in table if p.feature in features and (stage is None or p.stage == stage)]


def load() -> None:
    """Check the contract and install what every SGLang process needs.

    When something of ours is asked for, the whole of it is checked here, also what is only installed in a
    process that starts later: a server is refused before it answers anything. SGLang places the hooks when
    all plugins have spoken; placing them here would lock out other plugins that hook the same function.
    """
    if disabled():
        return
    from .algorithms import register_selected

    asked = selected()
    features = ("names", *FEATURES) if asked else ("names",)
    try:
        require(patches_of(*features))
        register(patches_of(*features, stage="load"))
        register_selected()
    except ContractError as error:
        if asked:
            sys.exit(f"sgl_graft refuses to start: {error}")
        logger.warning("sgl_graft stays out of this server: %s", error)
