"""The long-prompt set: continue a module of the Python standard library, its package's other modules in view.

Made from the interpreter's own source, so nothing is downloaded or shipped. Every context length has the same
rows, cut at the same places; a longer one only sees more of the package.
"""

import ast
import json
import platform
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

# Pure-Python packages of several modules, large enough for the longest prompts, in every supported CPython.
PACKAGES = (
    "asyncio",
    "concurrent/futures",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml/dom",
    "xml/etree",
    "xml/sax",
    "xmlrpc",
)
LINES_INTO_BODY = 2  # a cut leaves the start of the function's body in view
LINES_AFTER = 12  # and at least this much of the module to write


@dataclass(frozen=True)
class Cut:
    """A prompt ends after `line` lines of `module`, inside a function."""

    package: str
    module: Path
    line: int


def write_code_prompts(
    folder: Path, tokenizer: Any, contexts: Sequence[int], num_rows: int, seed: int = 0
) -> list[Path]:
    """One JSONL file per context length; same arguments and Python version, same bytes."""
    cuts = _choose_cuts(_library(), num_rows, seed)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for context in contexts:
        file = folder / f"code_{context / 1024:g}k.jsonl"
        rows = [_row(cut, tokenizer, context) for cut in cuts]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        written.append(file)
    return written


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _choose_cuts(library: Path, num_rows: int, seed: int) -> list[Cut]:
    """Packages in turn, a random place in each: neighbouring rows never share a package."""
    shuffled = []
    for package in PACKAGES:
        cuts = [cut for module in _modules(library / package) for cut in _cuts(package, module)]
        random.Random(f"{seed}/{package}").shuffle(cuts)
        shuffled.append(cuts)
    most = max(len(cuts) for cuts in shuffled)
    rounds = (cuts[turn] for turn in range(most) for cuts in shuffled if turn < len(cuts))
    chosen = list(islice(rounds, num_rows))
    if len(chosen) < num_rows:
        raise ValueError(
            f"--rows {num_rows}: the standard library at {library} has {len(chosen)} places to cut"
        )
    return chosen


def _modules(package: Path) -> list[Path]:
    return sorted(file for file in package.glob("*.py") if file.stem != "__main__")


def _cuts(package: str, module: Path) -> list[Cut]:
    source = module.read_text(encoding="utf-8")
    num_lines = source.count("\n")
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = [node.body[0].lineno - 1 + LINES_INTO_BODY for node in functions if not _is_short(node)]
    return [Cut(package, module, line) for line in sorted(lines) if line + LINES_AFTER <= num_lines]


def _is_short(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    end = function.end_lineno or function.lineno
    return end - function.body[0].lineno < 2 * LINES_INTO_BODY


def _row(cut: Cut, tokenizer: Any, context: int) -> dict[str, Any]:
    lines = cut.module.read_text(encoding="utf-8").splitlines(keepends=True)
    siblings = [module for module in _modules(cut.module.parent) if module != cut.module]
    before = [line for module in siblings for line in _titled(cut.package, module)]
    shown = [*before, _title(cut.package, cut.module), *lines[: cut.line]]
    prompt, num_tokens = _last_lines(shown, tokenizer, context)
    return {
        "prompt": prompt,
        "raw": True,
        "context_tokens": num_tokens,
        "module": f"{cut.package}/{cut.module.name}:{cut.line}",
        "python": platform.python_version(),
        "reference": "".join(lines[cut.line : cut.line + LINES_AFTER]),
    }


def _titled(package: str, module: Path) -> list[str]:
    return [_title(package, module), *module.read_text(encoding="utf-8").splitlines(keepends=True), "\n"]


def _title(package: str, module: Path) -> str:
    return f"# {package}/{module.name}\n"


def _last_lines(lines: Sequence[str], tokenizer: Any, limit: int) -> tuple[str, int]:
    """As many whole lines from the end as fit in `limit` tokens."""

    def tail(num_lines: int) -> tuple[str, int]:
        text = "".join(lines[len(lines) - num_lines :])
        return text, len(tokenizer.encode(text))

    # A line takes at least one token, so `limit` lines are more than enough.
    fits, too_many = 1, min(limit, len(lines)) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if tail(middle)[1] <= limit:
            fits = middle
        else:
            too_many = middle
    return tail(fits)
