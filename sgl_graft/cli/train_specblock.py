"""`sgl-graft train specblock`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sgl_graft.cli.train_inputs import target_and_data


def train_specblock(
    run: Annotated[Path, typer.Option(help="Folder of the run; an interrupted run continues where it was.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Dialogue files or folders; default: the shipped ones.")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Target folder; default: the embedded model.")] = None,
    steps: Annotated[
        int, typer.Option(help="Total optimizer steps; raise it to continue a finished run.")
    ] = 1500,
    lr: float = 8e-4,
    warmup: int = 40,
    decay_steps: Annotated[int, typer.Option(help="Steps of linear decay at the end.")] = 300,
    batch_targets: Annotated[int, typer.Option(help="Answer tokens per step.")] = 1024,
    block: Annotated[int, typer.Option(help="Tokens per block (K), fixed for the draft's life.")] = 4,
    layers: int = 2,
    draft_vocab: Annotated[int, typer.Option(help="Tokens the draft can propose.")] = 3392,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Width of the draft's MLP; default: the target's.")
    ] = None,
    max_len: Annotated[int, typer.Option(help="Longest context trained.")] = 1024,
    blocks: Annotated[int, typer.Option(help="Chained blocks trained.")] = 2,
    keep: Annotated[float, typer.Option(help="Share of rows that go on to each next block.")] = 0.4,
    valid_prefix: Annotated[bool, typer.Option(help="A wrong slot stops the loss of later ones.")] = True,
    rank_weight: Annotated[float, typer.Option(help="Weight of the rank head's loss; 0: untrained.")] = 1.0,
    shift: Annotated[bool, typer.Option(help="Layer-wise shift; off for an ablation.")] = True,
    broadcast: Annotated[bool, typer.Option(help="Prefix broadcast; off for an ablation.")] = True,
    weight_decay: float = 0.02,
    bf16: Annotated[bool, typer.Option(help="Matrix products in bfloat16.")] = True,
    threads: Annotated[int, typer.Option(help="Parts a batch is split in, one core each.")] = 2,
    eval_every: int = 100,
    save_every: int = 50,
    compute_missing_features: Annotated[bool, typer.Option(help="Compute features before training.")] = True,
    seed: int = 0,
) -> None:
    """Train a SpecBlock draft. Stop it at any time: `RUN/export` always holds the latest evaluated draft."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from sgl_graft.draft_training import eagle3_job, specblock_job
    from sgl_graft.draft_training.loop import TrainSettings
    from sgl_graft.draft_training.specblock_recipe import SpecBlockSettings

    def report_shard(name: str, tokens: int) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')} features of {name}: {tokens:,} tokens")

    try:
        target, dialogue_files = target_and_data(target, data)
        job = specblock_job.SpecBlockJob(
            target=target,
            data=dialogue_files,
            run=run,
            draft_vocab_size=draft_vocab,
            block=block,
            layers=layers,
            intermediate_size=intermediate_size,
            shift=shift,
            broadcast=broadcast,
            batch_targets=batch_targets,
            max_len=max_len,
            train=TrainSettings(
                steps=steps,
                lr=lr,
                warmup=warmup,
                decay_steps=decay_steps,
                weight_decay=weight_decay,
                threads=threads,
                seed=seed,
                eval_every=eval_every,
                save_every=save_every,
            ),
            specblock=SpecBlockSettings(
                blocks=blocks, keep=keep, valid_prefix=valid_prefix, rank_weight=rank_weight, bf16=bf16
            ),
        )
        if compute_missing_features:
            eagle3_job.compute_features(job.target, job.data, run / "features", report_shard)
        torch.set_num_threads(1)
        _train(job)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _train(job: Any) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from sgl_graft.draft_training import eagle3_job, specblock_job

    trainer = specblock_job.make_trainer(job)
    console = Console()
    words = sys.argv[sys.argv.index("specblock") :] if "specblock" in sys.argv else ["specblock"]
    command = "sgl-graft train " + " ".join(shlex.quote(word) for word in words)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=job.train.steps, completed=trainer.step)

        def report(record: dict[str, Any]) -> None:
            bar.update(task, completed=record["step"], description=f"loss {record['loss']:.3f}")
            figures = record.get("held_out")
            if not figures:
                return
            rates = " ".join(
                f"{one:.3f}/{four:.3f}" for one, four in zip(figures["top1"], figures["top4"], strict=True)
            )
            console.print(
                f"{time.strftime('%H:%M:%S')} step {record['step']} loss {record['loss']:.3f} held-out "
                f"top-1/top-4 by slot {rates}, chain {figures['chain']:.3f} (one block "
                f"{figures['chain1']:.3f}), {record['targets_seen'] / max(1.0, record['seconds']):.0f} "
                "answer tokens/s",
                soft_wrap=True,
            )
            specblock_job.write_card(job, trainer, command, figures)
            eagle3_job.draw_curve(job.run / "log.jsonl", job.run / "curve.png")

        trainer.run(report)
    typer.echo(f"draft exported to {job.run / 'export'}")
