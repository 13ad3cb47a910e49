"""Functions of the kernel library by name, with the types of their arguments."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .native_build import load

POINTER = ctypes.c_void_p
INT = ctypes.c_int64


@functools.cache
def function(name: str, signature: str, result: Any = None) -> Any:
    """``name`` of the library; ``signature`` has a letter per argument: ``p`` a pointer, ``i`` an int64.

    Raises:
        RuntimeError: there is no kernel library; ask ``kernels.available`` first.
    """
    library = load()
    if library is None:
        raise RuntimeError(f"{name} was called, but the CPU kernels are switched off or could not be built")
    found = getattr(library, name)
    found.argtypes = [{"p": POINTER, "i": INT}[letter] for letter in signature]
    found.restype = result
    return found
