"""Who may read and write which successor table. Host bookkeeping, done once per request.

Three scopes. ``shared``: one table for everybody. ``group``: a table per label; a request without a label
is a group of its own. ``request``: a table per row of the request pool, cleared for every new request. No
information crosses from one table to another, and a table is cleared before other requests use it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..serving.request_settings import RequestSettings

NO_TABLE = -1
Scope = Literal["shared", "group", "request"]


@dataclass(frozen=True)
class Assignment:
    """What to do before a request's first token is learned.

    Attributes:
        table: the table of the request's row; ``NO_TABLE`` keeps it out.
        clear: a table to empty first, ``NO_TABLE`` for none.
        evicted: rows that lose their table, because it went to another group.
    """

    table: int
    clear: int = NO_TABLE
    evicted: tuple[int, ...] = ()


class Tenancy:
    """Assigns tables to requests.

    Args:
        scope: who shares.
        num_tables: how many tables there are; with scope ``request`` one per row.
        running: whether a request still generates; the tables of those that do are not given away.
    """

    def __init__(self, scope: Scope, num_tables: int, running: Callable[[Any], bool]) -> None:
        self._scope = scope
        self._num_tables = num_tables
        self._running = running
        # Row -> its request, kept alive so that nothing depends on when a rank's garbage is collected: all
        # ranks of a server must assign the same tables.
        self._owner: dict[int, Any] = {}
        self._table: dict[int, int] = {}  # row -> its table
        self._groups: OrderedDict[Any, int] = OrderedDict()  # label -> table, longest unused first
        self._alone: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()
        self.turned_away = 0  # requests that found every table in use

    def owns(self, row: int, request: Any) -> bool:
        """Whether this very request, not one that has the same id, was assigned this row last."""
        return self._owner.get(row) is request

    def begin(self, row: int, request: Any, settings: RequestSettings) -> Assignment:
        """A request takes over a row."""
        self._owner[row] = request
        self._table[row] = NO_TABLE  # what the former owner held is not this request's
        assignment = self._assign(row, request, settings)
        for lost in assignment.evicted:
            self._table[lost] = NO_TABLE
        self._table[row] = assignment.table
        return assignment

    def _assign(self, row: int, request: Any, settings: RequestSettings) -> Assignment:
        if self._scope == "request":  # cleared even when it stays unused: the former owner's traces go
            return Assignment(row if settings.enabled else NO_TABLE, clear=row)
        if not settings.enabled:
            return Assignment(NO_TABLE)
        if self._scope == "shared":
            return Assignment(0)
        label = settings.group or self._alone.setdefault(request, object())
        if label in self._groups:
            self._groups.move_to_end(label)
            return Assignment(self._groups[label])
        if len(self._groups) < self._num_tables:
            table = len(self._groups)
            self._groups[label] = table
            return Assignment(table, clear=table)
        return self._take_over(label)

    def _take_over(self, label: Any) -> Assignment:
        in_use = {self._table.get(row) for row, owner in self._owner.items() if self._running(owner)}
        for former, table in self._groups.items():
            if table in in_use:
                continue
            del self._groups[former]
            self._groups[label] = table
            rows = tuple(row for row, held in self._table.items() if held == table)
            return Assignment(table, clear=table, evicted=rows)
        self.turned_away += 1
        return Assignment(NO_TABLE)
