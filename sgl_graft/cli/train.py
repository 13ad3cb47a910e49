"""`sgl-graft train`: generate dialogues and train drafts."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sgl_graft.cli.train_blockpilot import train_blockpilot, train_blockpilot_tail
from sgl_graft.cli.train_dflash import train_dflash
from sgl_graft.cli.train_inputs import target_and_data
from sgl_graft.cli.train_specblock import train_specblock
from sgl_graft.embedded import EMBEDDED_MODEL

app = typer.Typer(help="Generate on-policy data and train drafts.", no_args_is_help=True)
app.command("dflash")(train_dflash)
app.command("specblock")(train_specblock)
app.command("blockpilot")(train_blockpilot)
app.command("blockpilot-tail")(train_blockpilot_tail)


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
        target or models.get(EMBEDDED_MODEL),
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


@app.command("features")
def make_features(
    run: Annotated[Path, typer.Option(help="The training run's folder.")],
    data: Annotated[list[Path], typer.Option(help="Dialogue files or folders of shards.")],
    target: Annotated[Path | None, typer.Option(help="Target folder; default: the embedded model.")] = None,
    watch: Annotated[float, typer.Option(help="Look for new shards every so many seconds; 0: once.")] = 0.0,
) -> None:
    """Compute the target features of dialogues that have none yet (also beside a running training)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from sgl_graft import models
    from sgl_graft.draft_training.eagle3_job import compute_features

    folder = target or models.get(EMBEDDED_MODEL)

    def report(name: str, tokens: int) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')} {name}: {tokens:,} tokens")

    while True:
        compute_features(folder, tuple(data), run / "features", report)
        if not watch:
            return
        time.sleep(watch)


@app.command("eagle3")
def train_eagle3(
    run: Annotated[Path, typer.Option(help="Folder of the run; an interrupted run continues where it was.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Dialogue files or folders; default: the shipped ones.")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Target folder; default: the embedded model.")] = None,
    steps: Annotated[
        int, typer.Option(help="Total optimizer steps; raise it to continue a finished run.")
    ] = 1500,
    lr: float = 6e-4,
    warmup: int = 40,
    decay_steps: Annotated[int, typer.Option(help="Steps of linear decay at the end.")] = 300,
    batch_targets: Annotated[int, typer.Option(help="Answer tokens per step.")] = 1024,
    draft_vocab: Annotated[int, typer.Option(help="Tokens the draft can propose.")] = 8192,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Width of the draft's MLP; default: the target's.")
    ] = None,
    max_len: Annotated[int, typer.Option(help="Longest context trained.")] = 1344,
    rope: Annotated[str | None, typer.Option(help="JSON of rope_parameters; default: the target's.")] = None,
    max_position_embeddings: Annotated[int | None, typer.Option(help="Default: the target's.")] = None,
    chain_steps: Annotated[int, typer.Option(help="Steps of the training-time test.")] = 5,
    keep: Annotated[float, typer.Option(help="Share of chains trained beyond the first step.")] = 0.5,
    weight_decay: float = 0.02,
    bf16: Annotated[bool, typer.Option(help="Matrix products in bfloat16.")] = True,
    threads: Annotated[int, typer.Option(help="Parts a batch is split in, one core each.")] = 2,
    eval_every: int = 100,
    save_every: int = 50,
    start_from: Annotated[Path | None, typer.Option(help="Exported draft to continue from.")] = None,
    compute_missing_features: Annotated[bool, typer.Option(help="Compute features before training.")] = True,
    seed: int = 0,
) -> None:
    """Train an EAGLE-3 draft. Stop it at any time: `RUN/export` always holds a draft that SGLang loads."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import json

    from sgl_graft.draft_training import eagle3_job
    from sgl_graft.draft_training.eagle3_recipe import Eagle3Settings
    from sgl_graft.draft_training.loop import TrainSettings

    try:
        target, dialogue_files = target_and_data(target, data)
        job = eagle3_job.Eagle3Job(
            target=target,
            data=dialogue_files,
            run=run,
            draft_vocab_size=draft_vocab,
            batch_targets=batch_targets,
            max_len=max_len,
            rope=json.loads(rope) if rope else None,
            max_position_embeddings=max_position_embeddings,
            intermediate_size=intermediate_size,
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
            eagle3=Eagle3Settings(steps=chain_steps, keep=keep, bf16=bf16),
        )
        if compute_missing_features:
            eagle3_job.compute_features(job.target, job.data, run / "features", report_shard)
        _train(job)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def report_shard(name: str, tokens: int) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} features of {name}: {tokens:,} tokens")


def _train(job: Any) -> None:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from sgl_graft.draft_training import eagle3_job

    torch.set_num_threads(1)
    trainer = eagle3_job.make_trainer(job)
    console = Console()
    words = sys.argv[sys.argv.index("eagle3") :] if "eagle3" in sys.argv else ["eagle3"]
    command = "sgl-graft train " + " ".join(shlex.quote(word) for word in words)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=job.train.steps, completed=trainer.step)

        def report(record: dict[str, Any]) -> None:
            bar.update(task, completed=record["step"], description=f"loss {record['loss']:.3f}")
            figures = record.get("held_out")
            if figures:
                rates = " ".join(
                    f"{one:.3f}/{four:.3f}"
                    for one, four in zip(figures["top1"], figures["top4"], strict=True)
                )
                console.print(
                    f"{time.strftime('%H:%M:%S')} step {record['step']} loss {record['loss']:.3f} "
                    f"held-out top-1/top-4 by depth {rates}, chain {figures['chain']:.3f}, "
                    f"{record['targets_seen'] / max(1.0, record['seconds']):.0f} answer tokens/s",
                    soft_wrap=True,
                )
                eagle3_job.write_card(job, trainer, command, figures)
                eagle3_job.draw_curve(job.run / "log.jsonl", job.run / "curve.png")

        trainer.run(report)
    typer.echo(f"draft exported to {job.run / 'export'}")


@app.command("simulate")
def simulate_draft(
    draft: Annotated[Path, typer.Option(help="Exported EAGLE-3, DFlash or SpecBlock draft.")],
    prompts: Annotated[list[Path], typer.Option(help="JSONL files with `prompt` or `turns`.")],
    target: Annotated[Path | None, typer.Option(help="Target folder; default: the embedded model.")] = None,
    cache: Annotated[Path, typer.Option(help="Keeps the target's answers for the next draft.")] = Path(
        "runs/simulate"
    ),
    num_prompts: Annotated[int, typer.Option(help="First rows of each file.")] = 20,
    tokens: Annotated[int, typer.Option(help="Answer tokens per prompt.")] = 128,
    steps: Annotated[int, typer.Option(help="EAGLE-3: depth of the tree.")] = 5,
    topk: int = 4,
    slots: int = 16,
    block_size: Annotated[int | None, typer.Option(help="DFlash; default: the draft's own.")] = None,
    graft_config: Annotated[
        str | None, typer.Option(help="SpecBlock: blocks, leaves, branching, as the server takes them.")
    ] = None,
) -> None:
    """Accept length of a draft (greedy, bonus included) without a server."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from sgl_graft import models
    from sgl_graft.config import load_config_text
    from sgl_graft.draft_training import simulate

    torch.set_num_threads(1)
    shape = simulate.TreeShape(steps, topk, slots)
    folder = target or models.get(EMBEDDED_MODEL)
    means = simulate.measure(
        folder,
        draft,
        prompts,
        cache,
        num_prompts=num_prompts,
        tokens=tokens,
        shape=shape,
        block_size=block_size,
        specblock=load_config_text(graft_config).specblock if graft_config else None,
    )
    for name, mean in means.items():
        typer.echo(f"{name:12s} {mean:.3f}")
    typer.echo(f"{'mean':12s} {sum(means.values()) / len(means):.3f}")


@app.command("pack")
def pack_dialogues(
    data: Annotated[list[Path], typer.Option(help="Dialogue files or folders of shards.")],
    output: Annotated[Path, typer.Option(help="One file with all of them.")],
) -> None:
    """Join shards into one compressed file, in a fixed order."""
    from sgl_graft.draft_training import dialogues

    found = sorted(dialogues.load_all(data), key=lambda d: (d.source.startswith("summary"), d.index))
    first = next(f for p in data for f in ([p] if p.is_file() else sorted(p.glob(f"*{dialogues.SUFFIX}"))))
    header = {k: v for k, v in dialogues.load(first).header.items() if k not in ("format", "sources", "mix")}
    dialogues.save(output, found, header)
    tokens = sum(d.num_answer_tokens for d in found)
    typer.echo(f"{len(found):,} dialogues, {tokens:,} answer tokens, {output.stat().st_size / 1e6:.2f} MB")
