"""The Dockerfiles, as far as they can be checked without a container engine (RUN lines: test_image.py)."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from .cases import CPU
from .chart import CHART, chart, engine_pod, render
from .dockerfile import DOCKER, FILES, read

ROOT = DOCKER.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(params=FILES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_linter_is_content(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [hadolint, "-c", DOCKER / ".hadolint.yaml", "--failure-threshold", "info", DOCKER / name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_linter_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian:latest\nRUN cd /tmp && sudo pip install x\n")
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), bad], capture_output=True, check=False)
    assert done.returncode != 0


def test_what_is_copied_is_in_the_repository_and_reaches_the_builder(name: str) -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    copies = [item for stage in read(name) for item in stage.instructions if item.name == "COPY"]
    sources = {source for item in copies if "from" not in item.flags for source in item.words[:-1]}
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not tracked or any(
            line == source or line.startswith(source + "/") for line in tracked.splitlines()
        ), f"{source} is not committed"
        assert "!" + source in ignored, f"{source} is left out by .dockerignore"


def test_copies_between_stages_name_a_stage(name: str) -> None:
    seen: set[str] = set()
    for stage in read(name):
        for item in stage.instructions:
            if item.name == "COPY" and "from" in item.flags:
                assert item.flags["from"] in seen
        seen.add(stage.name)


def test_the_package_is_copied_whole(name: str) -> None:
    """Every folder that pyproject.toml installs from."""
    copied = {
        source
        for stage in read(name)
        for item in stage.instructions
        if item.name == "COPY" and "from" not in item.flags
        for source in item.words[:-1]
    }
    needed = set(PROJECT["tool"]["setuptools"]["package-dir"].values()) | {"sgl_graft", "pyproject.toml"}
    assert needed <= copied


def test_runs_as_the_charts_user_and_not_as_root(name: str) -> None:
    user, group = read(name)[-1].last("USER").text.split(":")
    security = chart().values["podSecurityContext"]
    assert (int(user), int(group)) == (security["runAsUser"], security["runAsGroup"])
    assert int(user) > 0


def test_health_check_outlasts_the_server(name: str) -> None:
    check = read(name)[-1].last("HEALTHCHECK")
    assert "/health" in check.text
    assert (
        int(check.flags["timeout"].removesuffix("s")) > chart().values["probes"]["healthCheckTimeoutSeconds"]
    )
    body = check.text.removeprefix("CMD ")
    assert "timeout=24" in body and body.startswith("[")  # no shell needed, and it ends by itself


def test_one_entry_point() -> None:
    points = {tuple(read(name)[-1].last("ENTRYPOINT").words) for name in FILES}
    assert points == {("tini", "--", "python3", "-m", "sglang.launch_server")}
    (engine,) = engine_pod(render(CPU))["containers"]
    assert "command" not in engine  # the image's entry point, with the chart's arguments


def test_versions_are_the_projects() -> None:
    (sglang,) = [item for item in PROJECT["project"]["dependencies"] if item.startswith("sglang==")]
    assert read("Dockerfile")[-1].base == f"lmsysorg/sglang:v{sglang.removeprefix('sglang==')}"
    meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert meta["appVersion"] == PROJECT["project"]["version"] == chart().values["image"]["tag"]
    lock = (ROOT / "requirements.lock").read_text()
    assert "sglang-router==0.3.2" in (DOCKER / "Dockerfile").read_text() and "sglang-router==0.3.2" in lock


def test_the_cpu_images_own_command_is_the_charts() -> None:
    """`docker run` without arguments serves what values-cpu.yaml serves."""
    (engine,) = engine_pod(render(CPU))["containers"]
    assert sorted(read("Dockerfile.cpu")[-1].last("CMD").words) == sorted(engine["args"])
    variables = read("Dockerfile.cpu")[-1].environment()
    for item in engine["env"]:
        if item["name"] in variables:
            assert variables[item["name"]] == item["value"]
