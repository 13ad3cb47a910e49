"""Writing a file that others read while it is rewritten."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all: readers see the former content or the new one.

    Raises:
        OSError: the folder is not writable or the disk is full; the former file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
