"""Measures what whole trees and plain rounds cost by batch: one server, both kinds of rounds in turn."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from ..bench.client import run_requests
from ..bench.plan import Sampling
from ..bench.server import ServerProcess
from ..cli.serve import TreeSettings, default_server_args
from ..serving.load_costs import LoadCosts, read_load_costs
from .calibrate import shipped_prompts

BATCHES = (1, 2, 4, 8, 16)


def calibrate_load(
    *,
    target: Path,
    draft: Path,
    batches: Sequence[int],
    max_new_tokens: int,
    tree: TreeSettings,
    output: Path,
    timeout_s: float = 900.0,
    on_done: Callable[[], None] = lambda: None,
) -> LoadCosts:
    """Serve ``batch`` prompts at once for every batch and write the medians to ``output``.

    Args:
        target: served model folder, one that the shipped dialogues are for.
        draft: its EAGLE draft folder.
        batches: requests at once; each needs rounds of both kinds, so ``max_new_tokens`` of 64 or more.

    Raises:
        ValueError: nothing was measured, for instance because answers were too short.
    """
    prompts = iter(shipped_prompts(target.name, sum(batches), newest=True))  # none twice: a table remembers
    with tempfile.TemporaryDirectory() as folder:
        measured, config = Path(folder) / "costs.json", Path(folder) / "graft.json"
        config.write_text(json.dumps({"graft": {"load_cap": {"measure": str(measured)}}}))
        settings = TreeSettings(tree.steps, tree.topk, tree.slots, config)
        args = default_server_args("GRAFT", target=target, draft=draft, tree=settings)
        with ServerProcess("calibrate-load", args, Path(folder) / "server.log") as server:
            server.wait_ready(timeout_s)
            for batch in batches:
                run_requests(
                    server.url,
                    list(islice(prompts, batch)),
                    Sampling(max_new_tokens, ignore_eos=True),  # a batch keeps its size
                    temperature=0.0,
                    concurrency=batch,
                    timeout_s=timeout_s,
                    on_done=on_done,
                )
        if not measured.is_file():
            raise ValueError("no rounds of both kinds were measured: use more tokens per answer")
        costs = read_load_costs(measured)
        output.write_text(measured.read_text())
    return costs
