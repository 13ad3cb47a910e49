"""Facts about a request that its answer's ``meta_info.graft`` tells, beside the counts."""

from __future__ import annotations

import weakref
from typing import Any

_notes: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def note_version(request: Any, version: int) -> None:
    """A verify of `request` ran with these weights of the draft."""
    found = _notes.setdefault(request, {"draft_versions": [version, version]})
    found["draft_versions"][1] = version


def notes_of(request: Any) -> dict[str, Any]:
    """``draft_versions``: of the request's first and last verify; empty where nothing was noted."""
    return dict(_notes.get(request, {}))
