"""The machine and the software that a figure belongs to."""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# Rooms that do not run inside a server: a change there leaves earlier measurements valid.
OUTSIDE_ROOMS = {"bench", "cli", "draft_training", "drafts", "models"}
SOURCE_SUFFIXES = {".py", ".json", ".yaml", ".cpp", ".h"}
PACKAGES = ("sglang", "torch", "triton", "transformers", "sgl-graft", "numpy", "httpx")


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpu_names(),
        "platform": platform.platform(),
    }


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found | {"engine_source": engine_source_digest()}


def engine_source_digest() -> str:
    """Digest of every source file that runs inside a server of ours."""
    package = Path(__file__).parent.parent
    rooms = [room for room in package.iterdir() if room.name not in OUTSIDE_ROOMS]
    # An editable install keeps these two beside the package, a wheel inside it.
    rooms += [package.parent / name for name in ("cuda_graph", "patches")]
    files = sorted(
        file
        for room in rooms
        for file in ([room] if room.is_file() else room.rglob("*"))
        if file.suffix in SOURCE_SUFFIXES
    )
    state = hashlib.sha256()
    for file in files:
        state.update(file.name.encode() + b"\0" + file.read_bytes())
    return state.hexdigest()[:16]


def folder_fingerprint(folder: Path) -> list[list[Any]]:
    """Names, sizes and times of a checkpoint's files: a retrained draft is another draft."""
    return [
        [file.name, file.stat().st_size, int(file.stat().st_mtime)]
        for file in sorted(folder.iterdir())
        if file.is_file()
    ]


@dataclass(frozen=True)
class CpuClock:
    """CPU time used on the whole machine and by this process, at one moment."""

    at: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> "CpuClock":
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        counted = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = psutil.Process().cpu_times()
        return cls(time.monotonic(), counted - idle, own.user + own.system)

    def foreign_cores(self, later: "CpuClock", servers_s: float) -> float:
        """Cores kept busy, between two moments, by neither this process nor its servers."""
        busy = (later.busy_s - self.busy_s) - (later.own_s - self.own_s) - servers_s
        return max(0.0, busy / max(later.at - self.at, 1e-9))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []
