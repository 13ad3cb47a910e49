"""`sgl-graft train`: generate dialogues and train drafts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Generate on-policy data and train drafts.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Generate on-policy data and train drafts."""


@app.command("data")
def make_data(
    output: Annotated[Path, typer.Option(help="Folder of shards; existing shards count and are continued.")],
    target: Annotated[Path | None, typer.Option(help="Target folder; default: the embedded model.")] = None,
    tokens: Annotated[int, typer.Option(help="Answer tokens to have on disk.")] = 500_000,
    mix: Annotated[str, typer.Option(help="short, or long (texts to summarise).")] = "short",
    prompts: Annotated[list[Path] | None, typer.Option(help="JSONL with `prompt` or `turns`.")] = None,
    articles: Annotated[list[Path] | None, typer.Option(help="Dialogues whose answers to summarise.")] = None,
    seed: int = 0,
    slots: Annotated[int, typer.Option(help="Dialogues generated at once by a worker.")] = 96,
    worker: int = 0,
    workers: Annotated[int, typer.Option(help="One process each; start them with --worker 0..N-1.")] = 1,
) -> None:
    """Let the target write dialogues: one single-threaded process; start one per core."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from sgl_graft import models
    from sgl_graft.draft_training import make_data as data

    torch.set_num_threads(1)
    job = data.DataJob(
        target or models.get("smollm2-135m-instruct"),
        output,
        tokens,
        mix,
        tuple(prompts or ()),
        tuple(articles or ()),
        seed,
        slots,
        worker,
        workers,
    )

    def report(answered: int, rate: float) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')} {answered:,} answer tokens, {rate:.0f} generated tokens/s")

    try:
        data.run(job, report)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
