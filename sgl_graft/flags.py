"""What the plugin adds to SGLang's arguments: one flag, and names that turn into the engine's own."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .config import CONFIG_VARIABLE, load_config_text


class _GraftConfigAction(argparse.Action):
    """Checks the file where it is named and hands it to child processes, which inherit the environment."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            os.environ[CONFIG_VARIABLE] = load_config_text(values).model_dump_json(exclude_defaults=True)
        except ValueError as error:
            parser.error(str(error))


def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """Add ``--graft-config`` to the parser (runs after SGLang's own flags)."""
    parser.add_argument(
        "--graft-config",
        action=_GraftConfigAction,
        metavar="FILE_OR_JSON",
        default=argparse.SUPPRESS,
        help="sgl_graft: settings of GRAFT, BLOCKPILOT and SPECBLOCK, a YAML or JSON file or inline JSON.",
    )


def before_resolve(server_args: Any) -> None:
    """Turn an algorithm name of ours into the engine's own, and refuse what cannot work.

    Resolution happens once, in the process that was started by the user; children get the result.
    """
    if any(getattr(server_args, state, False) for state in ("_resolution_finished", "_resolution_failed")):
        return
    from .algorithms import rewrite, selected_algorithm
    from .patches import require
    from .plugin import patches_of
    from .startup_checks import check_draft

    rewrite(server_args)
    if selected_algorithm():
        require(patches_of("names", "graft"))  # load() did not know, when the name came from Python or a file
        check_draft(server_args)
        from .graft.startup import check_graft

        check_graft(server_args)
