"""Builds and loads the CPU kernels in ``native/``: plain C functions over raw pointers, no torch headers.

The library is compiled for the machine it runs on, once, in a few seconds, and kept in the cache folder under
a name that changes with the sources, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SWITCH = "SGLGRAFT_CPU_KERNELS"
SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-std=c++17", "-fopenmp", "-shared", "-fPIC")


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message says what to install."""


def cache_folder() -> Path:
    home = os.environ.get("SGLGRAFT_HOME")
    base = Path(home) if home else Path.home() / ".cache" / "sgl_graft"
    return base / "native"


def _compiler() -> tuple[str, str]:
    """The compiler and its version line."""
    name = os.environ.get("CXX", "g++")
    try:
        shown = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"no C++ compiler {name!r} ({error}); install g++ or set CXX to a GCC") from error
    return name, shown.stdout.splitlines()[0]


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = ("model name", "flags", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def build() -> Path:
    """Path of the built library, compiling it if the cache does not hold it.

    Raises:
        BuildError: there is no usable compiler.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    compiler, version = _compiler()
    digest = hashlib.sha256()
    for file in [*sources, *sorted(SOURCES.glob("*.h"))]:
        digest.update(file.read_bytes())
    digest.update("\n".join([version, _processor(), *FLAGS]).encode())
    library = cache_folder() / f"kernels-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *FLAGS, *map(str, sources), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        built.replace(library)  # atomic: several ranks may build at once
    return library


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """The kernel library; None where it is switched off or cannot be built, and plain torch is used."""
    mode = os.environ.get(SWITCH, "auto")
    if mode not in ("auto", "off"):
        raise ValueError(f"{SWITCH}={mode!r}: expected 'auto' or 'off'")
    if mode == "off":
        return None
    try:
        return ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        logger.warning("sgl_graft runs without its CPU kernels, on plain torch and slower: %s", error)
        return None
