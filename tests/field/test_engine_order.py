"""Tensors that captured graphs read must exist before the first graph is captured."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from sglang.srt.managers.scheduler import Scheduler

ROOT = Path(__file__).parents[2] / "sgl_graft"
# The worker's state is made in `alloc_memory_pool` of these classes.
ALLOCATES = {
    "graft/worker.py": ("GraftDraftWorker", "create_state"),
    "specblock/draft_worker.py": ("SpecBlockDraftWorker", "BlockOne"),
    "blockpilot/worker.py": ("BlockPilotWorker", "create_pilot"),
}


def calls_in(tree: ast.AST) -> list[str]:
    """Names of what is called, in the order of the source."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [ast.unparse(call.func).rsplit(".", 1)[-1] for call in calls]


def method(file: str, owner: str, name: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == name:
                    return each
    raise AssertionError(f"{owner}.{name} is not in {file}")


def test_state_is_allocated_before_graphs_are_captured() -> None:
    """The engine allocates pools, then captures; ours are made where it allocates."""
    source = inspect.getsource(Scheduler)
    order = [
        name for name in calls_in(ast.parse(source)) if name in ("alloc_memory_pool", "init_cuda_graphs")
    ]
    assert "alloc_memory_pool" in order and "init_cuda_graphs" in order
    first_capture = order.index("init_cuda_graphs")
    assert "alloc_memory_pool" not in order[first_capture:], order
    for file, (owner, what) in ALLOCATES.items():
        assert what in calls_in(method(file, owner, "alloc_memory_pool")), (file, what)
