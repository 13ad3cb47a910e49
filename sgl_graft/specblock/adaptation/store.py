"""Adapted weights on disk: one file, replaced at once, recognised when it is damaged or another draft's."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .weights import digest_of

FILE = "specblock-adapted.safetensors"
_WEIGHTS = "weights"

logger = logging.getLogger(__name__)


class Saved(NamedTuple):
    flat: Tensor  # [weights] bf16
    version: int
    bandit: dict[str, Any]


def check_writable(folder: Path) -> None:
    """Create the folder. Raises ValueError where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"specblock.adaptation.state_dir {folder} cannot be written: {error}. Name a folder that this "
            "user may write, or leave the key out to keep nothing."
        ) from error


def save(folder: Path, flat: Tensor, version: int, base: str, bandit: dict[str, Any]) -> None:
    """Replace the file in one step, readable by this user only. `base` is the digest of the draft that was
    adapted. Raises OSError or SafetensorError when it cannot, and leaves the former file as it was."""
    facts = {"version": version, "base": base, "digest": digest_of(flat), "bandit": bandit}
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.")
    os.close(descriptor)
    try:
        save_file({_WEIGHTS: flat}, name, metadata={"adapted": json.dumps(facts)})
        with Path(name).open("rb") as written:
            os.fsync(written.fileno())
        Path(name).chmod(0o600)
        Path(name).replace(folder / FILE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(folder: Path, base: str, size: int) -> Saved | None:
    """What :func:`save` wrote, or None when there is nothing.

    A damaged file is renamed to ``*.damaged``, with a warning, and counts as nothing.
    Raises ValueError for the weights of another draft.
    """
    file = folder / FILE
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as opened:
            facts = json.loads((opened.metadata() or {})["adapted"])
            flat = opened.get_tensor(_WEIGHTS)
        found = Saved(flat, int(facts["version"]), dict(facts["bandit"]))
        same_base = facts["base"] == base
        whole = flat.dtype == torch.bfloat16 and digest_of(flat) == facts["digest"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        set_aside(folder, str(error))
        return None
    if not whole:
        set_aside(folder, "its weights are not the ones that were saved")
        return None
    if not same_base or flat.numel() != size:
        raise ValueError(
            f"{file} holds weights that were adapted from another draft. Move it away, or name another "
            "specblock.adaptation.state_dir."
        )
    return found


def set_aside(folder: Path, why: str) -> None:
    """Rename a damaged file, and say so."""
    file = folder / FILE
    aside = file.with_name(file.name + ".damaged")
    file.replace(aside)
    logger.warning("SPECBLOCK starts with the draft as it was shipped: %s is damaged (%s)", aside, why)
