"""A running server's table, saved and loaded by name: what ``POST /graft/table/...`` does.

A name is a file in one folder that the operator chose, never a path: an administrator of the server is not
necessarily one of the machine.
"""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path

from ..serving.ranks import Agree
from .keeper import TableKeeper
from .state import GraftState
from .store import StoredTable, read_table, save_table

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def file_in(folder: Path | None, name: str) -> Path:
    """The file that a name stands for.

    Raises:
        ValueError: there is no folder, or the name is not one of a file in it.
    """
    if folder is None:
        raise ValueError(
            "this server has no folder for tables: start it with graft.table.folder, or with "
            "graft.table.save_path"
        )
    if not NAME.fullmatch(name):
        raise ValueError(
            f"table name {name[:120]!r} is not allowed: 1 to 100 letters, digits and ._- that begin with a "
            "letter or digit. It names a file in graft.table.folder, never a path"
        )
    path = folder / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"table {name!r} is a link or no file: this server neither reads nor replaces it")
    return path


class TableFiles:
    """Saves, loads and empties the table of one rank, when it is told to.

    Args:
        state: the table is its own.
        keeper: keeps the table's age, and the server's own file.
        agree: rank 0 reads and writes files; it gives every rank what it found, or its ValueError.
    """

    def __init__(self, state: GraftState, keeper: TableKeeper, agree: Agree) -> None:
        self._state = state
        self._keeper = keeper
        self._agree = agree
        self._folder = keeper.folder
        self._writer: threading.Thread | None = None
        self._failure = ""
        self._written = 0

    def save(self, name: str) -> None:
        """Begin to write the table; rounds go on meanwhile. :meth:`saved` says when it is done.

        Raises:
            ValueError: the table is private, the name is not allowed, or a save is in progress.
        """
        self._refuse_private()

        def begin() -> None:
            path = file_in(self._folder, name)
            if self._writer is not None and self._writer.is_alive():
                raise ValueError("a save is in progress: ask again when it has ended")
            table = self._state.table
            copy = replace(
                table, tokens=table.tokens.clone(), probs=table.probs.clone(), tags=table.tags.clone()
            )

            def write() -> None:
                self._failure = ""
                try:
                    save_table(copy, path, self._keeper.identity, self._keeper.began)
                    self._written = path.stat().st_size
                except OSError as error:
                    self._failure = error.strerror or type(error).__name__

            self._writer = threading.Thread(target=write, daemon=True)
            self._writer.start()

        self._agree(begin)

    def saved(self) -> int | None:
        """Bytes of the file last saved; None while it is being written, and on ranks that write none.

        Raises:
            ValueError: it could not be written; a former file of that name is untouched.
        """
        if self._writer is None or self._writer.is_alive():
            return None
        if self._failure:
            raise ValueError(f"the table could not be saved: {self._failure}")
        return self._written

    def load(self, name: str) -> None:
        """Replace what the table holds by a saved one.

        Raises:
            ValueError: as :meth:`save`; or the file is missing, damaged, no table, or of another target,
                tokenizer or shape. The table is then what it was.
        """
        self._refuse_private()

        def read() -> StoredTable:
            path = file_in(self._folder, name)
            if not path.is_file():
                raise ValueError(f"there is no table {name!r} in graft.table.folder")
            try:
                return read_table(self._state.table, path, self._keeper.identity)
            except ValueError as error:  # its owner may see the path, who asks over HTTP need not
                raise ValueError(str(error).replace(str(path), name)) from error

        self._keeper.replaced(self._agree(read))

    def clear(self) -> None:
        """Forget everything learned, on disk as well where the server keeps its own file."""
        self._state.clear()
        self._keeper.forgotten()

    def _refuse_private(self) -> None:
        if self._state.private:
            raise ValueError(
                f"tables of scope {self._state.scope} are private and never stored; only those of "
                "graft.table.scope: shared are"
            )
