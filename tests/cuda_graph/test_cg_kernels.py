"""The Triton kernels: against their references in the interpreter, and compiled for real GPUs without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE = 1500  # seconds; half a minute of work, but the machine may be busy
pytestmark = pytest.mark.timeout(2 * PATIENCE)
pytest.importorskip("triton")


def run_pytest(path: str, **environment: str) -> None:
    """Run a test folder in a fresh process: whether kernels are interpreted is decided when Triton is
    imported.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / path)]
    result = subprocess.run(
        command,
        env=os.environ | environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_kernels_equal_their_references_in_the_interpreter() -> None:
    run_pytest("kernels", TRITON_INTERPRET="1")


def test_every_kernel_compiles_for_a_hopper_gpu() -> None:
    script = HERE / "kernels" / "compile_for_gpu.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr[-4000:]
    source = "".join(path.read_text() for path in (HERE.parents[1] / "cuda_graph").glob("*_kernel.py"))
    assert set(result.stdout.split()) == set(re.findall(r"def (_\w+_kernel)\(", source))
