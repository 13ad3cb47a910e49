"""Calibration: serve training prompts with GRAFT, or replay recorded training answers; count; fit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ..bench.client import run_requests
from ..bench.plan import Sampling
from ..bench.prompts import Prompt, load_datasets, load_tokenizer
from ..bench.server import ServerProcess
from ..cli.serve import TreeSettings, default_server_args, has_cuda
from .calibration import Calibration, fit, write_calibration


def shipped_prompts(target: str, num_prompts: int, *, newest: bool = False) -> tuple[Prompt, ...]:
    """Prompts of the dialogues a shipped draft was trained on, an equal share of every source.

    Args:
        newest: those added last, which a draft trained before has not seen.

    Raises:
        ValueError: no dialogues ship for this target.
    """
    from ..draft_training.dialogues import shipped_openings

    openings = shipped_openings(target, num_prompts, newest=newest)
    return tuple(Prompt(index, ids, index) for index, (_, _, ids) in enumerate(openings))


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
        if has_cuda():  # what a captured draft proposes cannot be counted
            args.append("--cuda-graph-backend-decode=disabled")
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
    names = ", ".join(path.name for path in prompts) or "prompts of the shipped dialogues"
    calibration = fit(counters, target.name, f"{len(requests)} served prompts: {names}")
    write_calibration(output, calibration)
    return calibration


def calibrate_offline(recordings: Sequence[Path], target: str, output: Path) -> Calibration:
    """Fit to recorded answers (`sgl-graft bench record --dialogues`) and write the calibration.

    The answers must be ones that the draft was not trained on, or it looks better than it is.

    Raises:
        ValueError: a recording is missing, or they do not belong together.
    """
    from ..bench.count_replay import count_recording
    from ..bench.recording import Recording

    recording = Recording.join([Recording.load(path) for path in recordings])
    measured_on = f"{len(recording.answers)} recorded answers"
    calibration = fit(count_recording(recording), target, measured_on)
    write_calibration(output, calibration)
    return calibration
