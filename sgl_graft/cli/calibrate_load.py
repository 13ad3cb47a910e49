"""`sgl-graft calibrate-load`: what rounds cost on this machine, for GRAFT's load cap."""

from pathlib import Path
from typing import Annotated

import typer


def calibrate_load(
    output: Annotated[
        Path, typer.Option(help="Where to write the costs; load_costs.json beside the draft is found.")
    ],
    target: Annotated[Path | None, typer.Option(help="Model folder (default: the embedded model).")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft folder (default: the one that ships).")] = None,
    batches: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "1,2,4,8,16",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 96,
    steps: Annotated[int | None, typer.Option(help="Draft steps (default: as `serve`).")] = None,
    topk: Annotated[int | None, typer.Option(help="Branches per step.")] = None,
    slots: Annotated[int | None, typer.Option(help="Slots verified per round.")] = None,
) -> None:
    """Serve a few prompts at every load, whole trees and plain rounds in turn, and write what each cost."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from ..graft.load_calibrate import calibrate_load as run
    from .serve import TreeSettings, has_cuda, target_and_draft, tree_to_serve

    try:
        sizes = tuple(sorted({int(size) for size in batches.split(",")}))
    except ValueError as error:
        raise ValueError(f"--batches {batches}: give numbers separated by commas, such as 1,4,16") from error
    if sizes[0] < 1:
        raise ValueError(f"--batches {batches}: a batch has at least 1 request")
    target, draft = target_and_draft("GRAFT", target, draft)
    with Progress() as progress:
        task = progress.add_task("measuring", total=sum(sizes))
        costs = run(
            target=target,
            draft=draft,
            batches=sizes,
            max_new_tokens=max_new_tokens,
            tree=tree_to_serve(
                "GRAFT", TreeSettings(steps, topk, slots, None), "cuda" if has_cuda() else "cpu"
            ),
            output=output,
            on_done=lambda: progress.advance(task),
        )
    table = Table("batch", "plain, ms", f"{costs.slots} slots, ms", "whole trees are faster by")
    for batch, row in sorted(costs.seconds.items()):
        gain = costs.accept_len * row[1] / row[costs.slots]
        table.add_row(str(batch), f"{row[1] * 1e3:.1f}", f"{row[costs.slots] * 1e3:.1f}", f"{gain:.2f}")
    Console().print(table)
    typer.echo(f"{output}: {costs.accept_len:.2f} tokens per request and whole round while it was measured")
