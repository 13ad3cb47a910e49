"""`sgl-graft calibrate`: fit GRAFT to one draft and target."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..graft.calibration import Calibration

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    output: Annotated[Path, typer.Option(help="Where to write the calibration; put it beside the draft.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of training prompts (default: those of the shipped dialogues)."),
    ] = None,
    recording: Annotated[
        list[Path] | None,
        typer.Option(help="Instead of serving: recorded training answers (`bench record --dialogues`)."),
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Model folder (default: the embedded model).")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft folder (default: the one that ships).")] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts in all, or per file.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 128,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 8,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.0,
    steps: Annotated[int | None, typer.Option(help="Draft steps.")] = None,
    topk: Annotated[int | None, typer.Option(help="Branches per step.")] = None,
    slots: Annotated[int | None, typer.Option(help="Slots verified per round.")] = None,
) -> None:
    """Serve training prompts once, or replay recorded ones, and write what both rules choose by."""
    from rich.progress import Progress

    from ..graft.calibrate import calibrate as run
    from ..graft.calibrate import calibrate_offline
    from .serve import TreeSettings, embedded_target, target_and_draft

    if recording:
        from ..cpu import tree_kernels

        tree_kernels.register()
        fitted = calibrate_offline(recording, (target or embedded_target()).name, output)
        _print_gates(fitted)
        typer.echo(f"{output}: fitted on {fitted.rounds} rounds")
        return
    target, draft = target_and_draft("GRAFT", target, draft)
    with Progress() as progress:
        task = progress.add_task("calibrating", total=num_prompts * max(len(prompts or ()), 1))
        fitted = run(
            target=target,
            draft=draft,
            prompts=prompts or (),
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            concurrency=concurrency,
            temperature=temperature,
            tree=TreeSettings(steps, topk, slots, None),
            output=output,
            on_done=lambda: progress.advance(task),
        )
    _print_gates(fitted)
    typer.echo(f"{output}: fitted on {fitted.rounds} rounds")


def _print_gates(fitted: "Calibration") -> None:
    """What confidence is worth at each draft depth; `staged` looks at the marked ones."""
    from rich.console import Console
    from rich.table import Table

    from ..cuda_graph.stages import scaled_checkpoints

    used = scaled_checkpoints(fitted.steps) if fitted.steps else ()
    table = Table("depth", "AUC of confidence", "threshold", "checkpoint")
    for depth, threshold in sorted(fitted.thresholds.items()):
        mark = "yes" if depth in used else ""
        table.add_row(str(depth), f"{fitted.auc.get(depth, 0.0):.3f}", f"{threshold:.2f}", mark)
    Console().print(table)
