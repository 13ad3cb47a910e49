"""SGLang swallows a plugin's exception. A broken contract must stop the real launcher all the same."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from sgl_graft.patches import contract, table_for

from sgl_graft.plugin import DISABLE_VARIABLE

RESOLVE = Path(__file__).parents[1] / "resolve_arguments.py"


def engine_copy(folder: Path, changed: str | None = None, version: str | None = None) -> Path:
    """SGLang as links to the installed one: with one function edited, or as another release."""
    installed = contract._engine_folder()
    for file in installed.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            link = folder / "sglang" / file.relative_to(installed)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    if changed is not None:
        file, name = contract._module_file(changed)
        lines = file.read_text().splitlines()
        ((first, _last),) = contract._definitions(contract._parse(file.read_text()), name.split("."))
        lines[first - 1] += "  # edited"
        copy = folder / "sglang" / file.relative_to(installed)
        copy.unlink()
        copy.write_text("\n".join(lines) + "\n")
    if version is not None:
        info = folder / f"sglang-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n")
    return folder


def run(folder: Path, *command: str | Path, stdin: str = "", **environment: str) -> Any:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SGLGRAFT_", "SGLANG_PLATFORM"))}
    return subprocess.run(
        [sys.executable, "-P", *command],
        capture_output=True,
        text=True,
        input=stdin,
        env=kept | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"} | environment,
        timeout=500,
        check=False,
    )


def launch(folder: Path, algorithm: str) -> Any:
    flags = ("--model-path", folder, "--device", "cpu", "--speculative-algorithm", algorithm)
    return run(folder, "-m", "sglang.launch_server", *flags, "--speculative-draft-model-path", folder)


def resolve(folder: Path, **environment: str) -> dict[str, Any]:
    case = json.dumps({"argv": ["--model-path", "dummy", "--device", "cpu"]})
    done = run(folder, RESOLVE, stdin=case, **environment)
    answer: dict[str, Any] = json.loads(done.stdout)
    answer["stderr"] += done.stderr
    return answer


@pytest.mark.parametrize(("algorithm", "feature"), [("GRAFT", "graft"), ("EAGLE3", "cpu")])
def test_an_edited_function_stops_the_launcher(algorithm: str, feature: str, tmp_path: Path) -> None:
    target = next(patch.target for patch in table_for("0.5.23") if patch.feature == feature)
    done = launch(engine_copy(tmp_path, changed=target), algorithm)
    assert done.returncode != 0
    assert f"{target} has changed" in done.stderr
    assert "Reinstall stock sglang==0.5.23" in done.stderr


def test_another_release_stops_the_launcher(tmp_path: Path) -> None:
    done = launch(engine_copy(tmp_path, version="0.5.24"), "GRAFT")
    assert done.returncode != 0
    assert "supports SGLang 0.5.23, but 0.5.24 is installed" in done.stderr


def test_not_asked_for_another_release_runs_as_if_it_were_not_there(tmp_path: Path) -> None:
    answer = resolve(engine_copy(tmp_path, version="0.5.24"))
    assert answer["code"] is None, answer
    assert answer["patched"] == []
    assert "sgl_graft" not in answer["platform"]
    assert "stays out of this server" in answer["stderr"]


def test_not_asked_for_it_touches_only_its_flag_and_names(tmp_path: Path) -> None:
    answer = resolve(tmp_path)
    assert answer["code"] is None, answer
    names = {patch.target for patch in table_for(metadata.version("sglang")) if patch.feature == "names"}
    assert set(answer["patched"]) == names


def test_switched_off_nothing_is_touched(tmp_path: Path) -> None:
    answer = resolve(tmp_path, **{DISABLE_VARIABLE: "1"})
    assert answer["code"] is None, answer
    assert answer["patched"] == []
    assert "sgl_graft" not in answer["platform"]
