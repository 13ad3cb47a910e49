"""Checking and applying a patch table against the installed SGLang."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


def resolve(target: str) -> Any:
    """The upstream object behind a dotted path, unwrapped from hooks already applied.

    Raises:
        ContractError: the path no longer exists.
    """
    owner_path, name = target.rsplit(".", 1)
    try:
        owner = pkgutil.resolve_name(owner_path)
        found = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise ContractError(f"{target} does not exist in the installed SGLang ({error}).") from error
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    return inspect.unwrap(found) if callable(found) else found


def fingerprint(target: str) -> str:
    """First 16 hex digits of the SHA-256 of the target's dedented source, trailing blanks removed."""
    source = textwrap.dedent(inspect.getsource(resolve(target)))
    lines = "\n".join(line.rstrip() for line in source.splitlines())
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


def load_hook(patch: Patch) -> Callable[..., Any]:
    """Import what a patch puts in place."""
    module_name, attribute = patch.hook.split(":")
    module = importlib.import_module(f"sgl_graft.{module_name}")
    hook: Callable[..., Any] = getattr(module, attribute)
    return hook


def apply(patches: Iterable[Patch]) -> None:
    """Check fingerprints, then install the patches through SGLang's own hook registry.

    Raises:
        ContractError: an upstream function differs, or SGLang's registry could not place a hook
            (it only logs such failures, and would go on without it).
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    pending = [patch for patch in patches if patch.target not in HookRegistry._patched]
    problems = check(pending)
    if problems:
        raise ContractError(
            "The installed SGLang differs from the one sgl_graft was written against:\n  "
            + "\n  ".join(problems)
            + "\nReinstall stock sglang==0.5.23, or set SGL_GRAFT_DISABLE=1 to run without sgl_graft."
        )
    source = HookSource(plugin_name="sgl_graft", dist_name="sgl-graft")
    for patch in pending:
        HookRegistry.register(patch.target, load_hook(patch), HookType(patch.how), source=source)
    HookRegistry.apply_hooks()
    missed = [patch.target for patch in pending if patch.target not in HookRegistry._patched]
    if missed:
        raise ContractError(f"SGLang could not place the hooks on {', '.join(missed)}; see its log above.")
