"""`sgl-graft forget`: delete a saved successor table, which holds traces of users' text."""

from pathlib import Path
from typing import Annotated

import typer


def forget(path: Annotated[Path, typer.Argument(help="The file that graft.table.save_path names.")]) -> None:
    """Delete a saved table and what was set aside beside it; a running server saves it anew."""
    from ..graft.store import forget as delete

    if not delete(path):
        raise ValueError(f"{path}: there is no saved table; graft.table.save_path names the file")
    typer.echo(f"deleted {path}")
