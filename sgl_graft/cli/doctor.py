"""`sgl-graft doctor`: is this installation the one sgl_graft was written for?"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib import metadata
from typing import Annotated, Any

import typer

PACKAGES = ("sglang", "torch", "triton", "transformers", "xgrammar")
# Their versions are pinned by what requires them; a mismatch is named with the pin.
REQUIRERS = ("sgl-graft", "sglang", "torch")
VARIABLES = (
    "SGLGRAFT_HOME",
    "SGLGRAFT_DISABLE",
    "SGLGRAFT_CONFIG",
    "SGLANG_PLATFORM",
    "SGLANG_PLUGINS",
    "SGLANG_USE_CPU_ENGINE",
    "CUDA_VISIBLE_DEVICES",
)
ENTRY_POINTS = {
    "sglang.srt.plugins": ("sgl_graft", "sgl_graft.plugin:load"),
    "sglang.srt.platforms": ("sgl_graft_cpu", "sgl_graft.cpu.entry:activate"),
}
Row = dict[str, Any]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, on standard output.")] = False,
) -> None:
    """Check versions, patch set, entry points and configuration; exit with 1 when anything is wrong."""
    report = collect()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report)
    if report["problems"]:
        raise typer.Exit(1)


def collect() -> Row:
    """Everything that is checked, and a sentence for every problem."""
    sections: Row = {
        "versions": _versions(),
        "device": _device(),
        "patches": _patches(),
        "entry_points": _entry_points(),
        "environment": _environment(),
        "models": _models(),
    }
    problems = [
        f"{name.replace('_', ' ')}: {row['name']}: {row['problem']}"
        for name, rows in sections.items()
        for row in rows
        if row.get("problem")
    ]
    return {**sections, "problems": problems}


def _versions() -> list[Row]:
    rows: list[Row] = [{"name": "python", "value": platform.python_version()}]
    pins = _pins()
    for package in ("sgl-graft", *PACKAGES):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            wanted = ", ".join(map(str, pins.get(package, [package])))
            rows.append({"name": package, "value": "", "problem": f"not installed: pip install '{wanted}'"})
            continue
        required = pins.get(package, [])
        unmet = [str(pin) for pin in required if not pin.specifier.contains(version, prereleases=True)]
        row: Row = {"name": package, "value": version}
        if unmet:
            row["problem"] = f"{version} is installed, {', '.join(unmet)} is required"
        rows.append(row)
    return rows


def _pins() -> dict[str, list[Any]]:
    from packaging.requirements import Requirement

    pins: dict[str, list[Any]] = {}
    for requirer in REQUIRERS:
        try:
            lines = metadata.requires(requirer) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pins.setdefault(requirement.name.lower(), []).append(requirement)
    return pins


def _device() -> list[Row]:
    rows: list[Row] = [
        {"name": "machine", "value": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores"}
    ]
    try:
        import torch
    except ImportError as error:
        return [*rows, {"name": "torch", "value": "", "problem": str(error)}]
    for index in range(torch.cuda.device_count()):
        rows.append({"name": f"cuda:{index}", "value": torch.cuda.get_device_name(index)})
    if not torch.cuda.is_available():
        rows.append({"name": "accelerator", "value": "none: SGLang runs on sgl_graft's CPU platform"})
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        row: Row = {"name": "C++ compiler", "value": compiler or ""}
        if compiler is None:
            row["problem"] = "none found, the CPU kernels need one: apt-get install g++, or set CXX"
        rows.append(row)
    return rows


def _patches() -> list[Row]:
    from ..patches import ContractError, check, hook_exists, table_for

    try:
        table = table_for(metadata.version("sglang"))
    except (ContractError, metadata.PackageNotFoundError) as error:
        return [{"name": "table", "value": "", "problem": str(error)}]
    rows = []
    for patch in table:
        row: Row = {"name": patch.target, "value": "ok", "how": patch.how, "feature": patch.feature}
        row |= {"hook": patch.hook, "why": patch.why}
        problems = check([patch])
        if not hook_exists(patch):
            problems.append(f"sgl_graft has no {patch.hook}: the installation is damaged, install it again")
        if problems:
            row |= {"value": "differs", "problem": " ".join(problems)}
        rows.append(row)
    return rows


def _entry_points() -> list[Row]:
    rows = []
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    for group, (name, value) in ENTRY_POINTS.items():
        found = {point.name: point for point in metadata.entry_points(group=group)}
        row: Row = {"name": group, "value": f"{name} = {value}"}
        if name not in found:
            row["problem"] = f"{name} is not registered: install sgl-graft with pip, not by a path"
        elif found[name].value != value:
            row["problem"] = f"{name} is {found[name].value}, expected {value}: install sgl-graft again"
        elif allowed and name not in allowed:
            row["problem"] = f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves {name} out: add it"
        others = sorted(set(found) - {name})
        if others:
            row["value"] += f" (beside {', '.join(others)})"
        rows.append(row)
    return rows


def _environment() -> list[Row]:
    from ..config import CONFIG_VARIABLE, current_config
    from ..plugin import DISABLE_VARIABLE, disabled

    valid = True
    rows: list[Row] = [{"name": name, "value": os.environ[name]} for name in VARIABLES if name in os.environ]
    for row in rows:
        if row["name"] == DISABLE_VARIABLE and disabled():
            row["problem"] = "sgl_graft is switched off; unset it to use sgl_graft"
        if row["name"] == CONFIG_VARIABLE:
            try:
                current_config()
            except ValueError as error:
                row["problem"], valid = str(error), False
    config = current_config().model_dump_json() if valid else "invalid"
    return [*rows, {"name": "configuration in effect", "value": config}]


def _models() -> list[Row]:
    from .. import models

    rows: list[Row] = []
    for entry in models.entries():
        folder = models.path(entry.name)
        here = (folder / "config.json").is_file()
        remedy = f"not here: sgl-graft models get {entry.name}"
        absent = "not part of this installation" if entry.shipped else remedy
        rows.append({"name": entry.name, "value": str(folder) if here else absent})
    return rows


def show(report: Row) -> None:
    """The same as tables for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    for section, rows in report.items():
        if section == "problems":
            continue
        table = Table(title=section.replace("_", " "), title_justify="left", show_header=section == "patches")
        extra = ("how", "feature") if section == "patches" else ()
        for column in ("name", *extra, "status" if section == "patches" else "value"):
            table.add_column(column, overflow="fold")
        for row in rows:
            text = f"[red]{row['problem']}[/red]" if row.get("problem") else str(row["value"])
            table.add_row(row["name"].removeprefix("sglang."), *(row.get(name, "") for name in extra), text)
        console.print(table)
    for problem in report["problems"]:
        console.print(f"problem: {problem}", style="red", markup=False)
    if not report["problems"]:
        console.print("No problems found.", style="green")
