"""Nothing outside the patch set changes SGLang: no hook, no assignment into its modules or classes."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("sgl_graft", "cuda_graph")
HOOKING_NAMES = {"HookRegistry", "HookType", "plugin_hook", "register_resolution_hook", "_patched"}


def engine_names(tree: ast.AST) -> set[str]:
    """Names bound by importing from SGLang, anywhere in the file."""
    names = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "sglang"
            and not node.level
        ):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                alias.asname or "sglang" for alias in node.names if alias.name.split(".")[0] == "sglang"
            }
    return names


def root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def hooks(source: str) -> list[str]:
    """What in ``source`` would change SGLang, as `line: code`."""
    tree = ast.parse(source)
    engine = engine_names(tree)
    found = []
    for node in ast.walk(tree):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            targets = [*node.targets]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = [*node.targets]
        written = [t for t in targets if isinstance(t, ast.Attribute | ast.Subscript)]
        if any(root(t) in engine or ast.unparse(t).startswith("sys.modules[") for t in written):
            found.append(node)
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("setattr", "delattr"):
            if root(node.args[0]) in engine:
                found.append(node)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in HOOKING_NAMES:
                found.append(node)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            modules = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
            if any(m in HOOKING_NAMES or m.startswith(("unittest.mock", "pytest")) for m in modules):
                found.append(node)
    return [f"{getattr(node, 'lineno', 0)}: {ast.unparse(node)}" for node in found]


FILES = [file for room in ROOMS for file in sorted((REPOSITORY / room).rglob("*.py"))]


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(REPOSITORY)) for file in FILES])
def test_no_hook_outside_the_patch_set(file: Path) -> None:
    assert hooks(file.read_text()) == []


@pytest.mark.parametrize(
    "code",
    [
        "from sglang.srt import server_args\nserver_args.x = 1",
        "from sglang.srt.server_args import ServerArgs as S\nS.resolve_once = None",
        "import sglang.srt.utils as u\nsetattr(u, 'f', None)",
        "import sglang.srt.utils\nsglang.srt.utils.f = None",
        "def f():\n    from sglang.srt.layers import sampler\n    sampler.table['x'] += 1",
        "from sglang.srt.plugins.hook_registry import HookRegistry\nHookRegistry.register('x', None)",
        "import sys\nsys.modules['sglang.srt.x'] = None",
        "from unittest.mock import patch",
    ],
)
def test_the_scan_finds_hooks(code: str) -> None:
    assert hooks(code)


@pytest.mark.parametrize(
    "code",
    [
        "from sglang.srt.server_args import ServerArgs\nargs = ServerArgs(); args.device = 'cpu'",
        "from sglang.srt.layers import sampler\nsampler.register('x', None)",
        "import torch\ntorch.x = 1",
    ],
)
def test_the_scan_leaves_ordinary_code_alone(code: str) -> None:
    assert hooks(code) == []
