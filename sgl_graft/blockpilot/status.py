"""What BLOCKPILOT did, for people: ``internal_states[].blockpilot`` of ``GET /server_info``."""

from __future__ import annotations

from typing import Any

from .mlp import MlpPolicy
from .tail_rule import auc_by_offset


def blockpilot_status(pilot: Any) -> dict[str, Any]:
    """Totals since start of one worker's pilot.

    Reads the device, so it belongs to a request for status and never to a decode round.

    Returns:
        the policy, sizes first chosen, rounds and accept length by block size, rounds by width, drafted
        tokens really proposed and accepted, the share of rounds that speculated, and requests left at the
        default size by reason.
    """
    state = pilot.state
    rounds, accepted = state.rounds.tolist(), state.accepted.tolist()
    proposed = sum(count * (size - 1) for size, count in enumerate(rounds) if size)
    total = sum(rounds)
    status = {
        "policy": state.policy.name,
        "default": state.policy.default,
        "candidates": list(state.shape.candidates),
        "b_max": state.shape.b_max,
        "verify_len": state.verify_len,
        "rounds": total,
        "proposed": proposed,
        "accepted": sum(accepted),
        "accept_rate": sum(accepted) / proposed if proposed else 0.0,
        "accept_length": 1.0 + sum(accepted) / total if total else 0.0,
        "speculated_share": (total - rounds[1]) / total if total else 0.0,
        "rounds_by_size": {size: count for size, count in enumerate(rounds) if count},
        "accept_length_by_size": {
            size: 1.0 + accepted[size] / count for size, count in enumerate(rounds) if count
        },
        "first_sizes": {size: count for size, count in enumerate(state.first_sizes.tolist()) if count},
        "rounds_by_width": {width: count for width, count in state.width_rounds.items() if count},
        "offset_rates": state.history.shared_rates().tolist(),
        "defaulted": dict(state.policy.defaulted) if isinstance(state.policy, MlpPolicy) else {},
    }
    if pilot.tail is not None:
        tail = pilot.tail
        status["tail"] = {
            "blocks": int(tail.blocks),
            "grafted": int(tail.grafted),
            "grafted_slots": int(tail.grafted_slots),
            "table_bytes": tail.table.num_bytes,
        }
        if tail.candidates is not None:
            seen, true = tail.candidates.seen.tolist(), tail.candidates.true.tolist()
            status["tail"]["auc_by_offset"] = auc_by_offset(seen[0], true[0])
    return status


def real_proposals(result: None, manager: Any, meta_info: dict[str, Any], answer: Any, i: int) -> None:
    """After ``TokenizerManager._calculate_spec_decoding_metrics``: count what was really proposed.

    Upstream multiplies the rounds by the server's largest block. ``spec_num_cap_tokens`` sums the rows that
    were really verified, the root of each round among them.
    """
    from ..algorithms import selected_algorithm

    if selected_algorithm() != "BLOCKPILOT" or "spec_num_proposed_drafts" not in meta_info:
        return
    verified = getattr(answer, "spec_num_cap_tokens", None)
    if verified is None or len(verified) <= i:
        return
    proposed = verified[i] - meta_info["spec_verify_ct"]
    meta_info["spec_num_proposed_drafts"] = proposed
    meta_info["spec_accept_rate"] = meta_info["spec_num_correct_drafts"] / proposed if proposed else 0.0
