"""The successor table on disk: one safetensors file, owner-readable only, written whole or not at all.

The rows hold traces of what users wrote, so files are created with mode 0600 and ``forget`` deletes them.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..cuda_graph.successor_table import SuccessorTable

logger = logging.getLogger(__name__)

FORMAT = "2"
_TENSORS = ("tokens", "probs", "tags")
_BEGAN = "began"


@dataclass(frozen=True)
class TableIdentity:
    """What a table belongs to; successors of another vocabulary or target would only waste slots.

    Attributes:
        target: digest of the target's configuration.
        tokenizer: digest of the tokenizer's files.
    """

    target: str
    tokenizer: str


def identity_of(model_folder: Path) -> TableIdentity:
    """Identity of a served model: digests of its configuration and of its tokenizer's files."""

    def digest(names: tuple[str, ...]) -> str:
        whole = hashlib.sha256()
        for name in names:
            path = model_folder / name
            whole.update(path.read_bytes() if path.is_file() else b"")
        return whole.hexdigest()[:16]

    return TableIdentity(
        target=digest(("config.json",)), tokenizer=digest(("tokenizer.json", "tokenizer.model"))
    )


def _description(table: SuccessorTable, identity: TableIdentity) -> dict[str, str]:
    return {
        "format": FORMAT,
        "target": identity.target,
        "tokenizer": identity.tokenizer,
        "vocab_size": str(table.vocab_size),
        "k": str(table.k),
        "num_tables": str(table.num_tables),
        "context_rows": str(table.context_rows),
        "context_len": str(table.context_len),
    }


def save_table(table: SuccessorTable, path: Path, identity: TableIdentity, began: float = 0.0) -> None:
    """Write the table; what was saved before stays readable until the new file is complete.

    Args:
        began: when the table was last empty, in seconds since 1970.

    Raises:
        OSError: the disk is full or the folder is not writable; the former file is untouched.
    """
    content = save(
        {name: getattr(table, name).cpu().contiguous() for name in _TENSORS},
        metadata=_description(table, identity) | {_BEGAN: str(began)},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class StoredTable:
    """What a file held.

    Attributes:
        tensors: the table's, by name, on the host.
        began: when the table was last empty, in seconds since 1970; 0 when the file does not say.
    """

    tensors: dict[str, torch.Tensor]
    began: float

    def copy_into(self, table: SuccessorTable) -> None:
        """Replace the content of a table of the same shape."""
        for name, tensor in self.tensors.items():
            getattr(table, name).copy_(tensor)


def read_table(table: SuccessorTable, path: Path, identity: TableIdentity) -> StoredTable:
    """Read a file that fits the table; the table is not touched.

    Raises:
        ValueError: the file is missing, damaged, or belongs to another target, tokenizer or shape.
    """
    remedy = "name another file, or leave graft.table.path out to start empty"
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            expected = _description(table, identity)
            for key, value in expected.items():
                if found.get(key) != value:
                    raise ValueError(
                        f"table file {path} has {key} {found.get(key)!r}, this server needs {value!r}; "
                        f"{remedy}"
                    )
            began = float(found.get(_BEGAN, 0))
            loaded = {name: file.get_tensor(name) for name in _TENSORS}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"table file {path} cannot be read: {error}; {remedy}") from error
    for name, tensor in loaded.items():
        own: torch.Tensor = getattr(table, name)
        if own.shape != tensor.shape or own.dtype != tensor.dtype:
            raise ValueError(f"table file {path}: {name} has shape {tuple(tensor.shape)}; {remedy}")
    return StoredTable(loaded, began)


def load_table(table: SuccessorTable, path: Path, identity: TableIdentity) -> float:
    """Fill the table from a file.

    Returns:
        when the table was last empty, in seconds since 1970; 0 when the file does not say.

    Raises:
        ValueError: as :func:`read_table`; the table is then untouched.
    """
    stored = read_table(table, path, identity)
    stored.copy_into(table)
    return stored.began


def read_own_table(table: SuccessorTable, path: Path, identity: TableIdentity) -> StoredTable | None:
    """Read a file this server saved earlier; None where there is none that can be used.

    A damaged one is set aside, with a warning.
    """
    if not path.exists():
        return None
    try:
        return read_table(table, path, identity)
    except ValueError as error:
        aside = path.with_suffix(path.suffix + ".damaged")
        path.replace(aside)
        logger.warning("GRAFT starts with an empty table: %s. The file was moved to %s.", error, aside)
        return None


def forget(path: Path) -> bool:
    """Delete a saved table, what was set aside beside it, and what a save that was killed left there.

    Returns:
        whether there was anything to delete.
    """
    files = [file for file in (path, path.with_suffix(path.suffix + ".damaged")) if file.exists()]
    # What a save left that was killed holds the same traces.
    files += path.parent.glob(f".{glob.escape(path.name)}.*.tmp")
    for file in files:
        file.unlink(missing_ok=True)
    return bool(files)
