"""What each part of SpecBlock's draft is worth: small drafts, trained alike but for one part.

    python -m sgl_graft.draft_training.specblock_ablation --run runs/ablation --steps 150 \
        --features runs/specblock/features --prompts shared/data/bench/mt.jsonl

Every variant sees the same batches in the same order, from the same seed. Accept length is that of the greedy
trees of a server (`simulate`), per file; an interrupted run continues where it was.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer


@dataclass(frozen=True)
class Variant:
    """What is left out."""

    shift: bool = True
    broadcast: bool = True
    valid_prefix: bool = True
    rank_weight: float = 1.0
    children: tuple[int, int, int, int] | None = None


# Without a trained rank head its guesses mean nothing, so every class branches alike.
VARIANTS = {
    "whole": Variant(),
    "no-shift": Variant(shift=False),
    "no-broadcast": Variant(broadcast=False),
    "parallel": Variant(shift=False, broadcast=False),
    "no-valid-prefix": Variant(valid_prefix=False),
    "no-rank-head": Variant(rank_weight=0.0, children=(4, 4, 4, 4)),
}


def main(
    run: Annotated[Path, typer.Option(help="Folder of the variants' runs.")],
    features: Annotated[Path, typer.Option(help="Folder of features that `sgl-graft train` computed.")],
    prompts: Annotated[list[Path], typer.Option(help="Files whose answers are drafted.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Dialogues of the features; default: the shipped.")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Target folder; default: the embedded model.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each variant.")] = 150,
    batch_targets: Annotated[int, typer.Option(help="Answer tokens per step.")] = 512,
    intermediate_size: int = 256,
    variants: Annotated[str, typer.Option(help="Names, by comma.")] = ",".join(VARIANTS),
    num_prompts: Annotated[int, typer.Option(help="Prompts of each file.")] = 20,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 96,
    slots: int = 16,
    threads: int = 1,
) -> None:
    """Train the variants one after the other and report their accept lengths."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    unknown = set(variants.split(",")) - set(VARIANTS)
    if unknown:
        raise typer.BadParameter(
            f"no such variants: {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}"
        )
    from sgl_graft.cli.train_inputs import target_and_data
    from sgl_graft.draft_training.loop import TrainSettings
    from sgl_graft.draft_training.specblock_job import SpecBlockJob

    target, found = target_and_data(target, data)
    plain = SpecBlockJob(
        target=target, data=found, run=run, intermediate_size=intermediate_size, batch_targets=batch_targets,
        train=TrainSettings(
            steps=steps, lr=8e-4, warmup=min(40, steps), decay_steps=steps // 3, threads=threads,
            eval_every=steps, save_every=25,
        ),
    )  # fmt: skip
    for name in variants.split(","):
        row = one(name, plain, features, prompts, num_prompts=num_prompts, tokens=tokens, slots=slots)
        print(json.dumps(row), flush=True)
        with (run / "ablation.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")


def one(
    name: str,
    plain: Any,
    features: Path,
    prompts: list[Path],
    *,
    num_prompts: int,
    tokens: int,
    slots: int,
) -> dict[str, Any]:
    """Train one variant of the job `plain` and measure it; what `ablation.jsonl` has a line of."""
    from sgl_graft.config import SpecBlockConfig
    from sgl_graft.draft_training import simulate, specblock_job

    variant = VARIANTS[name]
    settings = replace(plain.specblock, valid_prefix=variant.valid_prefix, rank_weight=variant.rank_weight)
    job = replace(
        plain, run=plain.run / name, shift=variant.shift, broadcast=variant.broadcast, specblock=settings
    )
    job.run.mkdir(parents=True, exist_ok=True)
    if not (job.run / "features").exists():
        (job.run / "features").symlink_to(features.resolve())
    started = time.process_time()
    trainer = specblock_job.make_trainer(job)
    trainer.run()
    figures = trainer.evaluate_and_export()
    accept = simulate.measure(
        job.target, job.run / "export", prompts, plain.run / "answers",
        num_prompts=num_prompts, tokens=tokens,
        shape=simulate.TreeShape(slots=slots), specblock=SpecBlockConfig(children=variant.children),
    )  # fmt: skip
    return {
        "variant": name,
        **asdict(variant),
        "steps": trainer.step,
        "answer_tokens_seen": trainer.targets_seen,
        "cpu_seconds": round(time.process_time() - started),
        "top1": figures["top1"],
        "chain": figures["chain"],
        "accept_length": {file: round(value, 3) for file, value in accept.items()},
    }


if __name__ == "__main__":
    typer.run(main)
