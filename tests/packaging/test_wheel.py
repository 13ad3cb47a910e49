"""The product is a wheel: complete, and with nothing but `sgl_graft` at the top of site-packages."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from sgl_graft.models.package import client_command

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
# Top-level rooms of the repository, and where they install.
ROOMS = {"sgl_graft": "sgl_graft", "cuda_graph": "sgl_graft/cuda_graph", "patches": "sgl_graft/patches"}
MEGABYTE = 2**20


def files_of_rooms() -> set[str]:
    """Every source and data file of the product, under its installed name."""
    names = set()
    for room, installed in ROOMS.items():
        for file in (REPOSITORY / room).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                names.add(f"{installed}/{file.relative_to(REPOSITORY / room)}")
    return names


def test_every_package_of_the_tree_is_listed() -> None:
    found = {
        str(Path(name).parent).replace("/", ".") for name in files_of_rooms() if name.endswith("/__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_python_file_belongs_to_a_package() -> None:
    folders = {str(Path(name).parent) for name in files_of_rooms() if name.endswith(".py")}
    listed = {name.replace(".", "/") for name in PROJECT["tool"]["setuptools"]["packages"]}
    assert folders <= listed


def test_shipped_drafts_are_small() -> None:
    drafts = REPOSITORY / "sgl_graft" / "drafts"
    sizes = {
        folder.name: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for folder in (drafts.iterdir() if drafts.is_dir() else ())
    }
    assert all(size <= 20 * MEGABYTE for size in sizes.values()), sizes
    assert sum(sizes.values()) <= 50 * MEGABYTE, sizes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that leftovers of other builds cannot slip in."""
    copy = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        shutil.copytree(REPOSITORY / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, copy)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_it_holds_the_whole_product_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_rooms()


def test_it_registers_command_and_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (file,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        text = archive.read(file).decode()
    assert "[sglang.srt.plugins]\nsgl_graft = sgl_graft.plugin:load" in text
    assert "[sglang.srt.platforms]\nsgl_graft_cpu = sgl_graft.cpu.entry:activate" in text
    assert "sgl-graft = sgl_graft.cli.main:app" in text


class Installed:
    """An environment beside this one: the same packages without sgl_graft, then the wheel."""

    def __init__(self, folder: Path, wheel: Path):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        self.site = next((folder / "lib").glob("python3*")) / "site-packages"
        for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
            if not entry.name.startswith(("sgl_graft", "__editable__", "__pycache__", "_virtualenv")):
                (self.site / entry.name).symlink_to(entry)
        self.before = {entry.name for entry in self.site.iterdir()}
        assert self.run("-c", "import sgl_graft").returncode != 0
        install = ["--python", self.python, "install", "--quiet", "--no-deps", "--no-index", wheel]
        subprocess.run([*client_command(), *install], check=True)

    def run(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        # Elsewhere and isolated, so that the repository cannot be what is imported.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SGLGRAFT", "PYTHONPATH"))}
        command = [self.python, "-I", *args]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=self.site, env=environment, check=False
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installed:
    return Installed(tmp_path_factory.mktemp("environment") / "venv", wheel)


def test_nothing_else_lands_at_the_top_of_site_packages(installed: Installed) -> None:
    added = {entry.name for entry in installed.site.iterdir()} - installed.before
    assert added == {"sgl_graft", f"sgl_graft-{PROJECT['project']['version']}.dist-info"}


def test_it_imports_from_there(installed: Installed) -> None:
    code = "import sgl_graft, sgl_graft.patches as p; print(sgl_graft.__file__, p.__file__)"
    done = installed.run("-c", code)
    assert done.returncode == 0, done.stderr
    for file in done.stdout.split():
        assert Path(file).is_relative_to(installed.site)


def test_doctor_is_content_there(installed: Installed) -> None:
    done = installed.run(installed.python.with_name("sgl-graft"), "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["problems"] == []
