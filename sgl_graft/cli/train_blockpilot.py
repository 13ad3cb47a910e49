"""`sgl-graft train blockpilot`: run every block size, learn which is best, recommend a policy."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sgl_graft.blockpilot.labels import Rule


def train_blockpilot(
    run: Annotated[Path, typer.Option(help="Folder of the run; an interrupted collection continues.")],
    target: Annotated[Path | None, typer.Option(help="Target folder; default: the embedded model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="DFlash draft; default: the one that ships.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of training prompts; default: those of the shipped dialogues."),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(help="Folder of `sgl-graft train features`: draft over its answers, without a server."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts in all, or per file.")] = 120,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    seeds: Annotated[int, typer.Option(help="Runs per prompt and size at a temperature above 0.")] = 4,
    reach: Annotated[int, typer.Option(help="Sizes to either side of the default that are run.")] = 3,
    k: Annotated[int, typer.Option(help="Sizes to either side that the policy may choose.")] = 2,
    rule: Annotated[str, typer.Option(help="time (by the cost table) or accept (the paper's).")] = "time",
    recipe: Annotated[str, typer.Option(help="ours, or paper: the published one.")] = "ours",
    concurrency: Annotated[int, typer.Option(help="Requests in flight while collecting.")] = 8,
    batches: Annotated[str, typer.Option(help="Batch sizes of the cost table.")] = "1,8",
    cost_prompts: Annotated[int, typer.Option(help="Prompts per cell of the cost table.")] = 16,
    cost_tokens: Annotated[int, typer.Option(help="Tokens per prompt of the cost table.")] = 48,
    measure: Annotated[bool, typer.Option(help="Measure costs; else RUN's cost table is used.")] = True,
    ablations: Annotated[bool, typer.Option(help="Width, depth and input ablations in the report.")] = False,
    seed: int = 0,
) -> None:
    """Really run every block size, train BlockPilot's predictor on the labels, judge it, write a policy.

    The predictor is recommended only if its gain over the best fixed size is above 0 at the lower end of its
    interval on held-out prompts; otherwise the policy that is written is `fixed`.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    from sgl_graft.blockpilot import report as reports
    from sgl_graft.blockpilot.costs import FILE_NAME as COSTS_NAME
    from sgl_graft.blockpilot.costs import read_costs
    from sgl_graft.blockpilot.labels import scores_of
    from sgl_graft.blockpilot.policy_file import write_policy
    from sgl_graft.blockpilot.training import ABLATIONS, OURS, PAPER

    if rule not in ("time", "accept") or recipe not in ("ours", "paper"):
        raise typer.BadParameter(f"--rule is time or accept, --recipe ours or paper, not {rule}, {recipe}")
    from .serve import target_and_draft

    target, draft = target_and_draft("BLOCKPILOT", target, draft)
    default = _trained_block(draft)
    sizes = tuple(size for size in range(default - reach, default + reach + 1) if size >= 1)
    if recorded is not None:
        asked, runs = _walk_recorded(run, target, draft, recorded, sizes, num_prompts)
    else:
        asked = _prompts(target, prompts, num_prompts)
        runs = _collect(
            run, target, draft, asked, sizes, default, tokens, temperature, seeds, concurrency,
            tuple(map(int, batches.split(","))), cost_prompts, cost_tokens, measure,
            "accept" if rule == "accept" else "time",
        )  # fmt: skip
    scores = scores_of(runs, sizes)
    by_key = {prompt.key: prompt for prompt in asked}
    hidden, head = _last_hidden(target, [by_key[key].ids for key in scores.prompts])
    costs = read_costs(run / COSTS_NAME) if rule == "time" else None
    evidence = reports.Evidence(
        scores, hidden, tuple(by_key[key].group for key in scores.prompts), head, default, costs
    )
    figures, predictor = reports.full_report(
        evidence,
        PAPER if recipe == "paper" else OURS,
        rule,
        tuple(map(int, batches.split(","))),
        ABLATIONS if ablations else None,
        k,
        seed,
    )
    figures["stopped_early"] = sum(each.stopped for each in runs)
    document = reports.recommend(evidence, figures, (temperature, temperature), k)
    path = write_policy(run, document, predictor if document.policy == "mlp" else None)
    (run / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
    (run / "report.md").write_text(reports.as_markdown(figures, document))
    typer.echo(reports.as_markdown(figures, document))
    typer.echo(f"{path}: policy {document.policy}, default {document.default}; put it beside the draft")


def _walk_recorded(
    run: Path, target: Path, draft: Path, recorded: Path, sizes: tuple[int, ...], count: int
) -> tuple[tuple[Any, ...], list[Any]]:
    """Runs over recorded answers; written to RUN like collected ones."""
    from dataclasses import asdict

    from sgl_graft.blockpilot.collect import RUNS_NAME
    from sgl_graft.blockpilot.recorded import recorded_runs

    prompts, runs = recorded_runs(target, draft, recorded, sizes, count)
    run.mkdir(parents=True, exist_ok=True)
    (run / RUNS_NAME).write_text("".join(json.dumps(asdict(each)) + "\n" for each in runs))
    return prompts, runs


def _prompts(target: Path, files: list[Path] | None, count: int) -> tuple[Any, ...]:
    from sgl_graft.bench.prompts import load_datasets, load_tokenizer
    from sgl_graft.blockpilot.collect import LabelPrompt, shipped_label_prompts

    if not files:
        return shipped_label_prompts(target.name, count)
    datasets = load_datasets(files, count, load_tokenizer(target))
    return tuple(
        LabelPrompt(f"{dataset.name}:{prompt.index}", dataset.name, prompt.input_ids)
        for dataset in datasets
        for prompt in dataset.prompts
    )


def _trained_block(draft: Path) -> int:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    size = parse_dflash_draft_config(
        draft_hf_config=get_config(str(draft), trust_remote_code=False)
    ).resolve_block_size(default=None)
    if size is None:
        raise ValueError(f"the draft {draft} does not say the block size it was trained at")
    return int(size)


def _collect(
    run: Path,
    target: Path,
    draft: Path,
    prompts: tuple[Any, ...],
    sizes: tuple[int, ...],
    default: int,
    tokens: int,
    temperature: float,
    seeds: int,
    concurrency: int,
    batches: tuple[int, ...],
    cost_prompts: int,
    cost_tokens: int,
    measure: bool,
    rule: Rule,
) -> list[Any]:
    """Run what is missing on one server; nothing is started when nothing is."""
    from sgl_graft.bench.machine import machine
    from sgl_graft.bench.server import ServerProcess
    from sgl_graft.blockpilot.collect import Collector, CollectPlan, measure_costs, read_runs
    from sgl_graft.blockpilot.costs import FILE_NAME, read_costs, write_costs

    from .serve import TreeSettings, default_server_args, has_cuda

    plan = CollectPlan(sizes, default, tokens, temperature, seeds, concurrency)
    wanted = {(p.key, size, s) for p in prompts for size in sizes for s in plan.seed_values}
    known = read_runs(run, rule)
    have = {(each.prompt, each.size, each.seed) for each in known}
    costs_path = run / FILE_NAME
    if not wanted - have and (costs_path.is_file() or not measure):
        return [each for each in known if (each.prompt, each.size, each.seed) in wanted]
    run.mkdir(parents=True, exist_ok=True)
    widths = sorted({1, *sizes})
    config = run / "server.json"
    config.write_text(json.dumps({"blockpilot": {"policy": "fixed", "default": default, "widths": widths}}))
    args = default_server_args(
        "BLOCKPILOT", target=target, draft=draft, tree=TreeSettings(slots=max(sizes), config=config)
    )
    total = len(wanted - have)
    with ServerProcess("blockpilot", args, run / "server.log") as server:
        server.wait_ready(600.0)
        if measure and not costs_path.is_file():
            table = measure_costs(
                server.url,
                prompts[:cost_prompts],
                sizes,
                batches,
                tokens=cost_tokens,
                machine=str(machine().get("cpu", "")),
                device="cuda" if has_cuda() else "cpu",
                on_done=lambda batch, size, seconds: typer.echo(
                    f"{time.strftime('%H:%M:%S')} batch {batch}, size {size}: {seconds * 1000:.1f} ms a round"
                ),
            )
            write_costs(costs_path, table)
        # By accept length a round counts as one, whatever it costs.
        costs = read_costs(costs_path) if rule == "time" and costs_path.is_file() else None
        done = 0

        def report(each: Any) -> None:
            nonlocal done
            done += 1
            if done % 50 == 0:
                typer.echo(f"{time.strftime('%H:%M:%S')} {done} of {total} runs")

        runs = Collector(server.url, run, plan, costs).collect(prompts, report)
    return [each for each in runs if (each.prompt, each.size, each.seed) in wanted]


def _last_hidden(target: Path, prompts: list[tuple[int, ...]]) -> tuple[Any, Any]:
    """The target's last hidden state at the last position of every prompt [prompts, hidden], and its head."""
    import torch
    from transformers import AutoModelForCausalLM

    from sgl_graft.blockpilot.predictor import Head

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    head = model.get_output_embeddings()
    with torch.no_grad():
        rows = [model.base_model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
    return torch.stack(rows), Head(head.weight.detach(), model.config.vocab_size, getattr(head, "bias", None))


def train_blockpilot_tail(
    output: Annotated[Path, typer.Option(help="File of the maps; put it beside the draft.")],
    target: Annotated[Path | None, typer.Option(help="Target folder; default: the embedded model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="DFlash draft; default: the one that ships.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of training prompts; default: those of the shipped dialogues."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts in all, or per file.")] = 60,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 96,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.0,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 8,
    slots: Annotated[int | None, typer.Option(help="Largest block; default: the draft's.")] = None,
) -> None:
    """Fit the rule for where Graft-TAIL's chain begins; show how well confidence tells right from wrong."""
    from sgl_graft.blockpilot.tail_calibrate import calibrate_tail

    from .serve import target_and_draft

    target, draft = target_and_draft("BLOCKPILOT", target, draft)
    fitted, draft_auc, table_auc = calibrate_tail(
        target,
        draft,
        _prompts(target, prompts, num_prompts),
        output,
        tokens=tokens,
        temperature=temperature,
        concurrency=concurrency,
        slots=slots or _trained_block(draft),
    )
    for offset, (own, theirs) in enumerate(zip(draft_auc, table_auc, strict=True), start=1):
        typer.echo(f"offset {offset}: AUC of the draft's confidence {own:.3f}, of the table's {theirs:.3f}")
    typer.echo(f"{output}: fitted on {fitted.rounds} rounds")
