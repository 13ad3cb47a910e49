"""`sgl-graft doctor`: green on this installation, and non-zero with a name for whatever is wrong."""

import json
from importlib import metadata
from typing import Any

import pytest
from sgl_graft.patches import contract, table_for
from typer.testing import CliRunner

from sgl_graft.cli import doctor as module
from sgl_graft.cli.main import app
from sgl_graft.config import CONFIG_VARIABLE
from sgl_graft.plugin import DISABLE_VARIABLE


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module.VARIABLES:
        if name != "CUDA_VISIBLE_DEVICES":
            monkeypatch.delenv(name, raising=False)


def run(expected_exit: int) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == expected_exit, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert bool(report["problems"]) == bool(expected_exit)
    return report


def test_this_installation_is_sound() -> None:
    report = run(0)
    assert {row["name"]: row["value"] for row in report["versions"]}["sglang"] == "0.5.23"
    assert len(report["patches"]) == len(table_for("0.5.23"))
    assert {row["value"] for row in report["patches"]} == {"ok"}
    assert all(row["why"] for row in report["patches"])


def test_the_tables_show_every_patch_and_the_verdict() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "No problems found." in result.stdout
    for patch in table_for("0.5.23"):
        assert patch.target.rsplit(".", 1)[1] in result.stdout


def test_a_changed_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target = table_for("0.5.23")[0].target
    original = contract.fingerprint
    monkeypatch.setattr(contract, "fingerprint", lambda name: "0" * 16 if name == target else original(name))
    (problem,) = run(1)["problems"]
    assert f"{target} has changed" in problem
    assert target in CliRunner().invoke(app, ["doctor"]).output


def test_a_missing_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_graft.patches.hook_exists", lambda patch: patch.hook != "flags:add_flags")
    (problem,) = run(1)["problems"]
    assert "sgl_graft has no flags:add_flags" in problem


def test_another_release_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    original = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.24" if name == "sglang" else original(name))
    problems = run(1)["problems"]
    assert any("0.5.24 is installed, sglang==0.5.23 is required" in problem for problem in problems)
    assert any("pip install 'sglang==0.5.23'" in problem for problem in problems)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        (DISABLE_VARIABLE, "1", "switched off"),
        (CONFIG_VARIABLE, '{"graft": {"rul": 1}}', "unknown key 'graft.rul'"),
        ("SGLANG_PLUGINS", "other", "leaves sgl_graft out"),
    ],
)
def test_an_environment_that_keeps_it_from_working_is_named(
    variable: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert any(expected in problem for problem in run(1)["problems"])


def test_a_missing_entry_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    problems = run(1)["problems"]
    assert len(problems) == 2
    assert all("is not registered" in problem for problem in problems)
