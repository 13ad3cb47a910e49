"""`sgl-graft models`: list, fetch and locate the models that need no hub."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sgl_graft import models

app = typer.Typer(help="Models that need no model hub.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="A name from `sgl-graft models list`.")]


@app.command("list")
def list_models() -> None:
    """List known models and whether they are on this machine."""
    table = Table("name", "on disk", "licence", "what")
    table.columns[0].no_wrap = True
    for entry in models.entries():
        present = (models.path(entry.name) / "config.json").is_file()
        table.add_row(entry.name, "yes" if present else "no", entry.license, entry.summary)
    Console().print(table)


@app.command("get")
def get_model(
    name: NameArgument, quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False
) -> None:
    """Fetch and convert a model; print its folder."""
    try:
        folder = models.get(name, progress=not quiet)
    except (ValueError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(folder)


@app.command("path")
def model_path(name: NameArgument) -> None:
    """Print a model's folder; exit with 1 when it is not on this machine."""
    try:
        folder = models.path(name)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(folder)
    if not (folder / "config.json").is_file():
        typer.echo(f"not there yet: run `sgl-graft models get {name}`", err=True)
        raise typer.Exit(1)
