"""Keeps the shared table on disk: filled at start, saved now and then, off the decode path."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

from ..config import TableConfig
from ..cuda_graph.successor_table import SuccessorTable
from ..serving.ranks import Agree
from .store import StoredTable, TableIdentity, forget, read_own_table, read_table, save_table

SECONDS_PER_DAY = 86_400.0

logger = logging.getLogger(__name__)


class TableKeeper:
    """Loads a table when the server starts and saves it while it serves.

    Args:
        table: the table in use.
        config: ``path`` names a file to load, refused when it does not fit; ``save_path`` a file of the
            server's own, loaded when it fits and set aside when it is damaged.
        identity: target and tokenizer the table belongs to.
        saves: whether this rank writes; all ranks hold the same table.
        agree: rank 0 reads files, which other ranks may not have; it gives every rank what it found.

    Attributes:
        identity: target and tokenizer the table belongs to.
        began: when the table was last empty, in seconds since 1970.
        saves: saves that succeeded.
        failed_saves: saves that did not, the former file being intact.
        set_aside: 1 when a saved table was damaged at start.
    """

    def __init__(
        self,
        table: SuccessorTable,
        config: TableConfig,
        identity: TableIdentity,
        *,
        saves: bool,
        agree: Agree = lambda decide: decide(),
    ) -> None:
        self._table = table
        self._config = config
        self.identity = identity
        self._writes = saves and config.save_path is not None
        self.saves = self.failed_saves = self.set_aside = 0
        self._writer: threading.Thread | None = None
        self._next_save = time.monotonic() + config.save_every_s
        self.began = time.time()
        stored = agree(self._stored)
        if stored is not None:
            stored.copy_into(table)
            self.began = stored.began
        self._started = time.monotonic()
        self._age_then = self._wall_age()
        self.forget_when_old()

    def _stored(self) -> StoredTable | None:
        """What the server begins with; None for an empty table."""
        config = self._config
        if config.path is not None:
            return read_table(self._table, config.path, self.identity)
        if config.save_path is None or not config.save_path.exists():
            return None
        stored = read_own_table(self._table, config.save_path, self.identity)
        self.set_aside = int(stored is None)
        return stored

    def _wall_age(self) -> float:
        """Seconds since the table was empty, by the wall clock; endless where that cannot be known."""
        age = time.time() - self.began
        return age if age >= 0.0 else float("inf")

    @property
    def age(self) -> float:
        """Seconds since the table was empty: no less for a wall clock that was set back meanwhile."""
        running = self._age_then + time.monotonic() - self._started
        wall = time.time() - self.began
        return max(running, wall)

    @property
    def folder(self) -> Path | None:
        """Where tables are saved and loaded by name; None: nowhere."""
        own = self._config.save_path
        return self._config.folder or (own.parent if own is not None else None)

    def replaced(self, stored: StoredTable) -> None:
        """Take another table's content in place of what this one holds."""
        stored.copy_into(self._table)
        self.began, self._started = stored.began, time.monotonic()
        self._age_then = self._wall_age()
        self.forget_when_old()

    def save_when_due(self) -> None:
        """Start a save when the interval has passed; costs a clock read otherwise."""
        self.forget_when_old()
        if not self._writes or time.monotonic() < self._next_save:
            return
        if self._writer is not None and self._writer.is_alive():
            return
        self._next_save = time.monotonic() + self._config.save_every_s
        table = self._table
        copy = replace(table, tokens=table.tokens.clone(), probs=table.probs.clone(), tags=table.tags.clone())
        self._writer = threading.Thread(target=self._write, args=(copy,), daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Wait for a save in progress."""
        if self._writer is not None:
            self._writer.join()

    def forget_when_old(self) -> None:
        """Empty a table that holds traces older than they may get, wherever it came from."""
        days = self._config.retain_days
        if days is None or self.age < days * SECONDS_PER_DAY:
            return
        self._table.clear()
        self.forgotten()
        logger.info("GRAFT emptied its table, which was older than graft.table.retain_days %s", days)

    def forgotten(self) -> None:
        """The table was emptied: delete the file this server saved it to, which a restart would load.

        A file that was only loaded (``path``) is its owner's, and stays.
        """
        self.wait()  # a save in progress would bring the file back
        self.began, self._started, self._age_then = time.time(), time.monotonic(), 0.0
        if self._writes and self._config.save_path is not None:
            forget(self._config.save_path)

    def _write(self, copy: SuccessorTable) -> None:
        assert self._config.save_path is not None
        try:
            save_table(copy, self._config.save_path, self.identity, self.began)
            self.saves += 1
        except OSError as error:
            self.failed_saves += 1
            logger.warning("GRAFT could not save its table, the last saved one is intact: %s", error)
