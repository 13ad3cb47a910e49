"""One rank's share of ``GET /graft/status``: the same words for every algorithm, plain values only."""

from __future__ import annotations

from typing import Any

from .adaptation_port import adaptation_of
from .camera import shape_of


def live_status(worker: Any, algorithm: str | None, calibration: dict[str, Any] | None) -> dict[str, Any]:
    """Totals since start of one rank's worker.

    Args:
        calibration: what a live calibration says of itself, None where there is none.

    Returns:
        what :class:`.route_models.RankStatus` describes.
    """
    adaptation = adaptation_of(worker)
    verifies = worker.verifies
    common = {
        "rounds": verifies.rounds,
        "committed_tokens": verifies.committed,
        "accept_length": verifies.accept_length,
        "accepted_at": {"all": list(verifies.accepted_at)},
        "tree": shape_of(worker.camera.last()),
        "calibration": calibration,
        "adaptation": None if adaptation is None else adaptation.status(),
    }
    own = {"GRAFT": _graft, "BLOCKPILOT": _blockpilot}.get(algorithm or "", _nothing)
    return common | own(worker)


def _nothing(_worker: Any) -> dict[str, Any]:
    return {}


def _graft(worker: Any) -> dict[str, Any]:
    from .status import graft_status, worker_status

    found = graft_status(worker.state) | worker_status(worker)
    return {
        "proposed_at": found.pop("used_by_depth"),
        "accepted_at": found.pop("accepted_by_depth"),
        "stages": found.pop("stages"),
        "table": found.pop("table"),
        "details": {key: value for key, value in found.items() if key not in ("rounds", "accept_length")},
    }


def _blockpilot(worker: Any) -> dict[str, Any]:
    from ..blockpilot.status import blockpilot_status

    found = blockpilot_status(worker.blockpilot)
    for shared in ("rounds", "accept_length"):
        found.pop(shared)
    sizes = {str(size): count for size, count in found.pop("rounds_by_size").items()}
    tail = found.pop("tail", None)
    return {
        "block_sizes": sizes,
        "table": None if tail is None else {key: tail[key] for key in ("table_bytes", "grafted_slots")},
        # JSON has no numbers as keys.
        "details": {key: _named(value) for key, value in found.items()},
    }


def _named(value: Any) -> Any:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value
