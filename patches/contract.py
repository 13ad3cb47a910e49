"""Checking and applying a patch table against the installed SGLang."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

How = Literal["replace", "before", "after", "around"]
Stage = Literal["load", "worker"]

SUPPORTED_VERSIONS = {"0.5.23": "sglang_0_5_23"}


class ContractError(RuntimeError):
    """The installed SGLang is not the one the patch table was written against."""


@dataclass(frozen=True)
class Patch:
    """One touched place of SGLang.

    Attributes:
        target: dotted path of the upstream function, method or class, where it is defined.
        how: ``replace``, ``before``, ``after`` or ``around`` (SGLang's own hook kinds).
        hook: ``module:attribute`` of what is put there, relative to ``sgl_graft``.
        why: the reason, for a person.
        fingerprint: first 16 hex digits of the SHA-256 of the upstream source.
        feature: the part of the product that needs it; only selected features are applied.
        stage: ``load`` when SGLang loads plugins; ``worker`` just before a speculative worker is built
            (those targets live in modules that are slow to import in the HTTP process).
    """

    target: str
    how: How
    hook: str
    why: str
    fingerprint: str
    feature: str
    stage: Stage = "load"


def table_for(version: str) -> tuple[Patch, ...]:
    """The patch table of one SGLang release.

    Raises:
        ContractError: no table was written for that release.
    """
    folder = SUPPORTED_VERSIONS.get(version)
    if folder is None:
        supported = ", ".join(sorted(SUPPORTED_VERSIONS))
        raise ContractError(
            f"sgl_graft supports SGLang {supported}, but {version} is installed. "
            f"Install the supported release: pip install 'sglang=={supported}'."
        )
    module = importlib.import_module(f".{folder}.table", __package__)
    table: tuple[Patch, ...] = module.PATCHES
    return table


def _engine_folder() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ContractError("SGLang is not installed: pip install 'sglang==0.5.23'.")
    return Path(next(iter(spec.submodule_search_locations)))


def _module_file(target: str) -> tuple[Path, str]:
    """The source file that defines a target, and the target's name inside it; nothing is imported."""
    parts = target.split(".")
    folder = _engine_folder()
    for index, part in enumerate(parts[1:], start=1):
        if (file := folder / f"{part}.py").is_file():
            return file, ".".join(parts[index + 1 :])
        if not (folder / part).is_dir():
            return folder / "__init__.py", ".".join(parts[index:])
        folder = folder / part
    return folder / "__init__.py", ""


def source(target: str) -> str:
    """Source of a function, method or class, decorators included, read from the installed file.

    Reading the file instead of the object means that nothing needs importing, so that the process that
    answers HTTP can check everything before it serves, and that hooks already in place do not matter.

    Raises:
        ContractError: there is no such definition.
    """
    file, name = _module_file(target)
    try:
        text = file.read_text()
    except OSError as error:
        raise ContractError(f"{target} does not exist in the installed SGLang ({error}).") from error
    lines = text.splitlines(keepends=True)
    found = ["".join(lines[first - 1 : last]) for first, last in _definitions(_parse(text), name.split("."))]
    if not name or not found:
        raise ContractError(f"{target} does not exist in the installed SGLang ({file} has no {name!r}).")
    return "".join(textwrap.dedent(piece) for piece in found)


@functools.lru_cache(maxsize=32)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _definitions(scope: ast.AST, path: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line of every definition of ``path`` below ``scope``, in any branch."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name != path[0]:
                continue
            if path[1:]:
                yield from _definitions(node, path[1:])
            else:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield first, node.end_lineno or node.lineno
        elif isinstance(node, ast.stmt | ast.excepthandler):
            yield from _definitions(node, path)


def fingerprint(target: str) -> str:
    """First 16 hex digits of the SHA-256 of the target's dedented source, trailing blanks removed."""
    lines = "\n".join(line.rstrip() for line in source(target).splitlines())
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def check(patches: Iterable[Patch]) -> list[str]:
    """One sentence for every patch whose upstream source is missing or has changed."""
    problems = []
    for patch in patches:
        try:
            found = fingerprint(patch.target)
        except ContractError as error:
            problems.append(str(error))
            continue
        if found != patch.fingerprint:
            problems.append(
                f"{patch.target} has changed: its source has fingerprint {found}, "
                f"sgl_graft was written against {patch.fingerprint}."
            )
    return problems


def require(patches: Iterable[Patch]) -> None:
    """Refuse an engine that differs from the one the patches were written against.

    Raises:
        ContractError: every difference, and the remedy.
    """
    problems = check(patches)
    if problems:
        raise ContractError(
            "The installed SGLang differs from the one sgl_graft was written against:\n  "
            + "\n  ".join(problems)
            + "\nReinstall stock sglang==0.5.23, or set SGLGRAFT_DISABLE=1 to run without sgl_graft."
        )


def hook_exists(patch: Patch) -> bool:
    """Whether our side of a patch is installed; nothing is imported but the packages above it."""
    module_name, attribute = patch.hook.split(":")
    try:
        spec = importlib.util.find_spec(f"sgl_graft.{module_name}")
    except ImportError:
        return False
    if spec is None or spec.origin is None:
        return False
    return bool(list(_definitions(_parse(Path(spec.origin).read_text()), [attribute])))


def load_hook(patch: Patch) -> Callable[..., Any]:
    """Import what a patch puts in place."""
    module_name, attribute = patch.hook.split(":")
    module = importlib.import_module(f"sgl_graft.{module_name}")
    hook: Callable[..., Any] = getattr(module, attribute)
    return hook


def register(patches: Iterable[Patch]) -> list[Patch]:
    """Check fingerprints and hand the hooks to SGLang's registry, which places them when it is told to.

    Returns:
        The patches that were not registered before.

    Raises:
        ContractError: an upstream function differs, or another plugin's hooks are in place already, in which
            case the registry would silently drop ours.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    ours = HookSource(plugin_name="sgl_graft", dist_name="sgl-graft")
    registered = {target for target, hooks in HookRegistry._hooks.items() if any(h[2] == ours for h in hooks)}
    pending = [patch for patch in patches if patch.target not in registered]
    require(pending)
    taken = [patch.target for patch in pending if patch.target in HookRegistry._patched]
    if taken:
        raise ContractError(
            f"another SGLang plugin already hooks {', '.join(taken)}; leave it out with "
            "SGLANG_PLUGINS=sgl_graft,sgl_graft_cpu."
        )
    for patch in pending:
        HookRegistry.register(patch.target, load_hook(patch), HookType(patch.how), source=ours)
    return pending


def apply(patches: Iterable[Patch]) -> None:
    """Register patches and put them in place now.

    Raises:
        ContractError: as :func:`register`, or SGLang's registry could not place a hook (it only logs such
            failures, and would go on without it).
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    pending = register(patches)
    HookRegistry.apply_hooks()
    missed = [patch.target for patch in pending if patch.target not in HookRegistry._patched]
    if missed:
        raise ContractError(f"SGLang could not place the hooks on {', '.join(missed)}; see its log above.")
