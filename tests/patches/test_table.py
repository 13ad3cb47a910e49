"""Every row of the patch table: it exists upstream, is current, can be put in place, and notices a change."""

import ast
import inspect
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from sgl_graft.patches import (
    ContractError,
    Patch,
    apply,
    check,
    contract,
    fingerprint,
    register,
    require,
    table_for,
)

TABLE = table_for("0.5.23")
IDS = [patch.target.removeprefix("sglang.") for patch in TABLE]


def test_every_row_is_current() -> None:
    assert check(TABLE) == []


def test_a_target_appears_once() -> None:
    assert len(set(IDS)) == len(IDS)


def test_every_row_gives_its_reason() -> None:
    for patch in TABLE:
        assert len(patch.why.split()) >= 2, patch.target


def copy_of_engine(target: str, into: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree that holds only the target's file; the contract reads it instead of the installed one."""
    file, _name = contract._module_file(target)
    copy = into / file.relative_to(contract._engine_folder())
    copy.parent.mkdir(parents=True)
    shutil.copy(file, copy)
    monkeypatch.setattr(contract, "_engine_folder", lambda: into)
    return copy


@pytest.mark.parametrize("patch", TABLE, ids=IDS)
def test_a_changed_function_is_caught_and_named(
    patch: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_of_engine(patch.target, tmp_path, monkeypatch)
    assert check([patch]) == []
    lines = copy.read_text().splitlines()
    _file, name = contract._module_file(patch.target)
    ((_first, last),) = contract._definitions(ast.parse(copy.read_text()), name.split("."))
    lines[last - 1] += "; changed = True"
    copy.write_text("\n".join(lines))
    (problem,) = check([patch])
    assert patch.target in problem


def test_a_change_elsewhere_in_the_file_is_not_our_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_of_engine(TABLE[0].target, tmp_path, monkeypatch)
    copy.write_text(copy.read_text() + "\n\ndef added_upstream():\n    return 1\n")
    assert check([TABLE[0]]) == []


def test_a_removed_function_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_of_engine(TABLE[0].target, tmp_path, monkeypatch)
    copy.write_text("x = 1\n")
    (problem,) = check([TABLE[0]])
    assert "does not exist" in problem
    assert TABLE[0].target in problem


@pytest.mark.parametrize(
    "target", ["sglang.srt.no_such.f", "sglang.srt.server_args.ServerArgs.no_such", "sglang"]
)
def test_a_target_that_is_not_there_is_named(target: str) -> None:
    with pytest.raises(ContractError, match=target):
        fingerprint(target)


def test_require_names_every_difference_and_the_remedy() -> None:
    stale = [Patch(**{**vars(patch), "fingerprint": "0" * 16}) for patch in TABLE[:2]]
    with pytest.raises(ContractError) as error:
        require([*stale, *TABLE[2:]])
    message = str(error.value)
    assert all(patch.target in message for patch in stale)
    assert TABLE[2].target not in message
    assert "sglang==0.5.23" in message
    assert "SGLGRAFT_DISABLE=1" in message


def test_nothing_is_applied_when_anything_differs() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = set(HookRegistry._patched)
    with pytest.raises(ContractError):
        apply([Patch(**{**vars(TABLE[0]), "target": TABLE[0].target + "x"}), *TABLE[1:]])
    assert HookRegistry._patched == before


def test_another_release_is_refused_with_the_remedy() -> None:
    with pytest.raises(ContractError, match=r"0\.5\.24 is installed.*pip install 'sglang==0\.5\.23'"):
        table_for("0.5.24")


@pytest.mark.parametrize("patch", TABLE, ids=IDS)
def test_the_hook_takes_what_upstream_passes(patch: Patch) -> None:
    hook = contract.load_hook(patch)
    (definition,) = ast.parse(contract.source(patch.target)).body
    if isinstance(hook, type):
        assert isinstance(definition, ast.ClassDef)
        assert patch.how == "replace"
        return
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = definition.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if any(ast.unparse(item) == "classmethod" for item in definition.decorator_list):
        assert patch.how != "replace", "a replacement would not get the class"
    extra = {"replace": 0, "before": 0, "after": 1, "around": 1}[patch.how]
    signature = inspect.signature(hook)
    signature.bind(*[None] * extra, *positional, **{argument.arg: None for argument in arguments.kwonlyargs})
    if patch.how == "replace":
        required = len(positional) - len(arguments.defaults)
        keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        needed = [argument.arg for argument, default in keywords if default is None]
        signature.bind(*positional[:required], **dict.fromkeys([*positional[required:], *needed]))


def test_a_function_that_another_plugin_hooked_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's registry skips what it has patched already, without a word."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", {TABLE[0].target})
    with pytest.raises(ContractError, match=r"another SGLang plugin already hooks .*SGLANG_PLUGINS"):
        register(TABLE[:1])
    assert not HookRegistry._hooks[TABLE[0].target]


def test_registering_twice_hooks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    assert register(TABLE[:2]) == list(TABLE[:2])
    assert register(TABLE[:2]) == []
    assert len(HookRegistry._hooks[TABLE[0].target]) == 1
