"""Calibration: serve training prompts with GRAFT, count which candidates come true, fit the maps."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ..bench.client import run_requests
from ..bench.plan import Sampling
from ..bench.prompts import Prompt, load_datasets, load_tokenizer
from ..bench.server import ServerProcess
from ..cli.serve import TreeSettings, default_server_args
from .calibration import Calibration, fit_maps, write_calibration


def shipped_prompts(target: str, num_prompts: int) -> tuple[Prompt, ...]:
    """Prompts of the dialogues a shipped draft was trained on, an equal share of every source.

    Raises:
        ValueError: no dialogues ship for this target.
    """
    from ..draft_training.dialogues import load, shipped

    path = shipped(target)
    if not path.is_file():
        raise ValueError(f"no training prompts ship for {target}: name a JSONL file with --prompts")
    by_source: dict[str, list[list[int]]] = {}
    for dialogue in load(path).dialogues:
        start = dialogue.answers[0][0]
        by_source.setdefault(dialogue.source, []).append(dialogue.ids[:start])
    share = -(-num_prompts // len(by_source))
    chosen = [ids for source in sorted(by_source) for ids in by_source[source][:share]]
    return tuple(Prompt(index, tuple(ids), index) for index, ids in enumerate(chosen[:num_prompts]))


def calibrate(
    *,
    target: Path,
    draft: Path,
    prompts: Sequence[Path],
    num_prompts: int,
    max_new_tokens: int,
    concurrency: int,
    temperature: float,
    tree: TreeSettings,
    output: Path,
    timeout_s: float = 600.0,
    on_done: Callable[[], None] = lambda: None,
) -> Calibration:
    """Run a GRAFT server over the prompts and write the fitted calibration to ``output``.

    Args:
        target: served model folder.
        draft: its EAGLE draft folder.
        prompts: JSONL files of training prompts, never the files that are measured on; none takes the
            prompts that the shipped drafts were trained on.

    Raises:
        ValueError: nothing was counted, for instance because every answer was one token long.
    """
    if prompts:
        datasets = load_datasets(prompts, num_prompts, load_tokenizer(target))
        requests = [prompt for dataset in datasets for prompt in dataset.prompts]
    else:
        requests = list(shipped_prompts(target.name, num_prompts))
    with tempfile.TemporaryDirectory() as folder:
        collected = Path(folder) / "counters.json"
        config = Path(folder) / "graft.json"
        config.write_text(json.dumps({"graft": {"collect": str(collected)}}))
        settings = TreeSettings(tree.steps, tree.topk, tree.slots, config)
        args = default_server_args("GRAFT", target=target, draft=draft, tree=settings)
        with ServerProcess("calibration", args, Path(folder) / "server.log") as server:
            server.wait_ready(timeout_s)
            run_requests(
                server.url,
                requests,
                Sampling(max_new_tokens),
                temperature=temperature,
                concurrency=concurrency,
                timeout_s=timeout_s,
                on_done=on_done,
            )
        if not collected.is_file():
            raise ValueError("the server counted no candidates: give more prompts or longer answers")
        counters = json.loads(collected.read_text())
    map_x, map_y = fit_maps(counters)
    calibration = Calibration(
        target=target.name,
        vocab_size=counters["vocab_size"],
        map_x=map_x,
        map_y=map_y,
        rounds=counters["rounds"],
    )
    write_calibration(output, calibration)
    return calibration
