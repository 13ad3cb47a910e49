"""A plugin for SGLang that breaks one tensor-parallel rank: the negative control of the rank check.

From the moment a trigger file exists, rank 1 verifies a tree of which one token is another than on rank 0,
as after a bit flip in the draft; or its successor table has such a token. `environment` makes the folder that
installs it for one server.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

TRIGGER = "SGLGRAFT_TEST_FAULTY_RANK"  # path of the trigger file
FAULTY = 1


def environment(folder: Path, trigger: Path, fault: str = "tree") -> dict[str, str]:
    """Environment variables of a server that loads this plugin, whose entry point is written to `folder`.

    `fault` is what goes wrong: the `tree` or the `table`.
    """
    info = folder / "faulty_rank-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-rank\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nfaulty_rank = {__name__}:break_{fault}\n")
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), TRIGGER: str(trigger)}


def break_tree() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
    HookRegistry.register(target, with_a_fault, HookType.AROUND)


def with_a_fault(original: Any, algorithm: Any, server_args: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    stock: Any = original(algorithm, server_args)
    trigger = Path(os.environ[TRIGGER])

    class FaultyWorker(stock):
        def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            faulty = get_parallel().tp_rank == FAULTY and trigger.exists()
            if faulty and not batch.forward_mode.is_idle():
                batch.spec_info.draft_token[1] ^= 1
            return super().verify(batch, *args, **kwargs)

    return FaultyWorker


def break_table() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sgl_graft.graft.state.GraftState.learn", flip_a_successor, HookType.BEFORE)


def flip_a_successor(state: Any, *_: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank == FAULTY and Path(os.environ[TRIGGER]).exists():
        state.table.tokens[state.table.empty_row - 1, 0] ^= 1  # a row that is hardly ever read
