"""What the plugin adds to SGLang's arguments: one flag, and names that turn into the engine's own."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
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

    Raises:
        ValueError: what cannot work and what to do; a server command ends with that sentence alone.
    """
    from .patches import ContractError

    try:
        _settle(server_args)
    except (ValueError, ContractError) as error:
        if not _is_server_command():
            raise
        sys.exit(f"sgl_graft refuses to start: {error}")


def _is_server_command() -> bool:
    """Whether a person started this process by a command of SGLang's, who needs no traceback."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return (main is not None and main.name == "sglang.launch_server") or Path(sys.argv[0]).name == "sglang"


def _settle(server_args: Any) -> None:
    if any(getattr(server_args, state, False) for state in ("_resolution_finished", "_resolution_failed")):
        return
    from .algorithms import rewrite, selected_algorithm
    from .patches import apply, require
    from .plugin import FEATURES, patches_of
    from .startup_checks import check_draft

    rewrite(server_args)
    if selected_algorithm():
        # load() cannot know a name from Python or a file, and has registered those patches only if it did.
        require(patches_of("names", *FEATURES))
        apply(patches_of(*FEATURES, stage="load"))
        check_draft(server_args)
        if selected_algorithm() == "BLOCKPILOT":
            from .blockpilot.startup import check_blockpilot, settle_slots

            settle_slots(server_args)
            check_blockpilot(server_args)
            return
        if selected_algorithm() == "SPECBLOCK":
            from .specblock.startup import check_specblock

            check_specblock(server_args)
            return
        from .graft.startup import check_graft

        check_graft(server_args)
