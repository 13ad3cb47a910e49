"""Files that others read while they are rewritten, and that a full disk must not turn into an outage."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


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


def write_or_warn(path: Path, text: str, key: str) -> None:
    """As :func:`write_whole`, from a server that goes on without the file; ``key`` is what named it."""
    try:
        write_whole(path, text)
    except OSError as error:
        logger.warning("%s %s could not be written, serving goes on: %s", key, path, error)


def check_writable(path: Path, key: str) -> None:
    """Refuse a file that could not be written later.

    Raises:
        ValueError: its folder is missing or nothing can be written there.
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"{key} {path} cannot be written: {error}. Name a file in a folder that exists and that this "
            "user may write"
        ) from error
