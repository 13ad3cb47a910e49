"""What the tests of the CPU's own kernels need from the machine."""

from __future__ import annotations

import os
import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    # Asked of the machine, not of the kernels: kernels that fail to build must fail their tests.
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="no C++ compiler here",
)
