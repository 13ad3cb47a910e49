"""Keeps the shared table on disk: filled at start, saved now and then, off the decode path."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from ..config import TableConfig
from ..cuda_graph.successor_table import SuccessorTable
from .store import TableIdentity, load_own_table, load_table, save_table

logger = logging.getLogger(__name__)


class TableKeeper:
    """Loads a table when the server starts and saves it while it serves.

    Args:
        table: the table in use.
        config: ``path`` names a file to load, refused when it does not fit; ``save_path`` a file of the
            server's own, loaded when it fits and set aside when it is damaged.
        identity: target and tokenizer the table belongs to.
        saves: whether this rank writes; all ranks hold the same table.
    """

    def __init__(
        self, table: SuccessorTable, config: TableConfig, identity: TableIdentity, *, saves: bool
    ) -> None:
        self._table = table
        self._config = config
        self._identity = identity
        self._saves = saves and config.save_path is not None
        self._writer: threading.Thread | None = None
        self._next_save = time.monotonic() + config.save_every_s
        if config.path is not None:
            load_table(table, config.path, identity)
        elif config.save_path is not None:
            load_own_table(table, config.save_path, identity)

    def save_when_due(self) -> None:
        """Start a save when the interval has passed; costs a clock read otherwise."""
        if not self._saves or time.monotonic() < self._next_save:
            return
        if self._writer is not None and self._writer.is_alive():
            return
        self._next_save = time.monotonic() + self._config.save_every_s
        table = self._table
        copy = replace(
            table, tokens=table.tokens.clone(), probs=table.probs.clone(), pairs=table.pairs.clone()
        )
        self._writer = threading.Thread(target=self._write, args=(copy,), daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Wait for a save in progress."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, copy: SuccessorTable) -> None:
        assert self._config.save_path is not None
        try:
            save_table(copy, self._config.save_path, self._identity)
        except OSError as error:
            logger.warning("GRAFT could not save its table, the last saved one is intact: %s", error)
