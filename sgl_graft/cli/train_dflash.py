"""`sgl-graft train dflash`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sgl_graft.cli.train_inputs import target_and_data


def train_dflash(
    run: Annotated[Path, typer.Option(help="Folder of the run; an interrupted run continues where it was.")],
    data: Annotated[list[Path] | None, typer.Option(help="Dialogues; default: the shipped ones.")] = None,
    target: Annotated[Path | None, typer.Option(help="Target folder; default: the embedded model.")] = None,
    features: Annotated[
        Path | None, typer.Option(help="Features of another run, e.g. an EAGLE-3 one.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Rows of a block, the anchor included.")] = 8,
    smallest_block: Annotated[int, typer.Option(help="Some batches train sizes from this up.")] = 4,
    full_size: Annotated[float, typer.Option(help="Share of batches with blocks of the full size.")] = 0.5,
    layers: int = 2,
    intermediate_size: int = 1024,
    mask_token_id: Annotated[int, typer.Option(help="A token of the target that no text uses.")] = 16,
    steps: int = 3000,
    lr: float = 1e-3,
    warmup: int = 60,
    decay_steps: int = 800,
    weight_decay: float = 0.02,
    batch_targets: Annotated[int, typer.Option(help="Answer tokens of a step.")] = 1024,
    anchor_share: Annotated[float, typer.Option(help="Share of answer positions that start a block.")] = 0.5,
    gamma: Annotated[float, typer.Option(help="Offset j weighs exp(-(j - 1) / gamma).")] = 2.5,
    sharpen: Annotated[
        float, typer.Option(help="Power of the target's probabilities; 1: as they are.")
    ] = 1.0,
    max_len: Annotated[int, typer.Option(help="Longest context trained.")] = 1024,
    bf16: Annotated[bool, typer.Option(help="Matrix products in bfloat16.")] = True,
    fuse: Annotated[
        bool | None, typer.Option(help="Fuse pointwise parts with torch.compile; default: where it can.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Parts a batch is split in, one core each.")] = 2,
    eval_every: int = 200,
    save_every: int = 100,
    start_from: Annotated[Path | None, typer.Option(help="Exported draft to continue from.")] = None,
    compute_missing_features: Annotated[bool, typer.Option(help="Compute features before training.")] = True,
    seed: int = 0,
) -> None:
    """Train a DFlash draft. Stop it at any time: `RUN/export` always holds a draft that SGLang loads."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from sgl_graft.draft_training import dflash_job, dflash_ops, eagle3_job
    from sgl_graft.draft_training.dflash_recipe import DFlashSettings
    from sgl_graft.draft_training.loop import TrainSettings

    torch.set_num_threads(1)
    try:
        target, dialogue_files = target_and_data(target, data)
        job = dflash_job.DFlashJob(
            target=target,
            data=dialogue_files,
            run=run,
            features=features,
            block_size=block_size,
            layers=layers,
            intermediate_size=intermediate_size,
            mask_token_id=mask_token_id,
            batch_targets=batch_targets,
            max_len=max_len,
            start_from=start_from,
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
            dflash=DFlashSettings(
                anchor_share=anchor_share,
                gamma=gamma,
                smallest_block=smallest_block,
                full_size=full_size,
                sharpen=sharpen,
                bf16=bf16,
                compile=dflash_ops.can_compile() if fuse is None else fuse,
            ),
        )
        if compute_missing_features:
            eagle3_job.compute_features(job.target, job.data, job.feature_folder, _report_shard)
        trainer = dflash_job.make_trainer(job)
        words = sys.argv[sys.argv.index("dflash") :] if "dflash" in sys.argv else ["dflash"]
        command = "sgl-graft train " + " ".join(shlex.quote(word) for word in words)

        def report(record: dict[str, Any]) -> None:
            figures = record.get("held_out")
            if figures:
                hits = " ".join(f"{hit:.3f}" for hit in figures["top1"])
                typer.echo(
                    f"{time.strftime('%H:%M:%S')} step {record['step']} loss {record['loss']:.3f} held-out "
                    f"top-1 by offset {hits}, chain {figures['chain']:.3f}, "
                    f"{anchor_share * record['targets_seen'] / max(1.0, record['seconds']):.0f} blocks/s"
                )
                dflash_job.write_card(job, trainer, command, figures)
                eagle3_job.draw_curve(job.run / "log.jsonl", job.run / "curve.png")

        trainer.run(report)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"draft exported to {run / 'export'}")


def _report_shard(name: str, tokens: int) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} features of {name}: {tokens:,} tokens")
