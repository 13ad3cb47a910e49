"""What a GRAFT server takes per request, and what it tells: groups, opting out, metrics; all `staged`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import READY_TIMEOUT_S, TIGHT
from .graft_tools import metric
from .payloads import PROMPTS, check, check_all, request, seeded
from .server import Payload, Reference, Server, Start
from .variants import EAGLE_TREE, Variant

CONFIG = {"graft": {"rule": "staged", "table": {"scope": "group", "groups": 2}}}


@pytest.fixture(scope="module")
def grouped(start_server: Start, tiny: dict[str, Path]) -> Iterator[Server]:
    """A `staged` server with two tables for groups."""
    variant = Variant("graft-groups", "GRAFT", EAGLE_TREE.shape, json.dumps(CONFIG))
    args = (*TIGHT, *variant.args(str(tiny["draft"])), "--enable-metrics")
    server = start_server(variant.name, tiny["llama"], *args, OMP_NUM_THREADS="1")
    server.process.wait_ready(READY_TIMEOUT_S)
    yield server
    server.stop()


def said(payload: Payload, **settings: Any) -> Payload:
    sampling = payload["sampling_params"] | {"custom_params": {"graft": settings}}
    return payload | {"sampling_params": sampling}


def graft_state(server: Server) -> dict[str, Any]:
    (state,) = server.info()["internal_states"]
    found: dict[str, Any] = state["graft"]
    return found


def test_groups_samples_and_requests_of_their_own(grouped: Server, reference: Reference) -> None:
    payloads = [said(request(prompt, 50), group=f"team-{i % 3}") for i, prompt in enumerate(PROMPTS)]
    payloads += [said(seeded(prompt, i, 40), group="team-0") for i, prompt in enumerate(PROMPTS[:3])]
    payloads += [request(PROMPTS[0], 50), seeded(n=3), said(request(PROMPTS[1], 50), enabled=False)]
    check_all(grouped, reference, payloads)
    state = graft_state(grouped)
    assert state["table"]["scope"] == "group" and sum(state["accepted_by_depth"]["table"]) > 0
    assert state["groups_turned_away"] > 0  # three teams and more at once, on two tables
    assert state["draft_steps"]["saved"] > 0


def test_an_answer_says_what_was_proposed_and_accepted(grouped: Server) -> None:
    answers = grouped.generate_all([said(request(prompt, 40), group="counts") for prompt in PROMPTS], 8)
    for answer in answers:
        meta = answer["meta_info"]
        (counts,) = meta["graft"]
        assert sum(counts["accepted"].values()) == meta["spec_num_correct_drafts"] > 0
        assert sum(counts["proposed"].values()) <= meta["spec_num_proposed_drafts"]
    *_, last = grouped.stream(said(request(PROMPTS[0], 40), group="counts"))
    assert sum(last["meta_info"]["graft"][0]["accepted"].values()) > 0
    out = grouped.generate(said(request(PROMPTS[0], 40), enabled=False))["meta_info"]["graft"][0]
    assert out["proposed"]["table"] == out["proposed"]["both"] == 0 < out["proposed"]["draft"]


def test_who_opts_out_is_verified_on_the_draft_alone(grouped: Server, reference: Reference) -> None:
    for prompt in PROMPTS[:2]:
        check(grouped, reference, said(request(prompt, 50), group="warm"))
    before = graft_state(grouped)
    check(grouped, reference, said(request(PROMPTS[0], 50), group="warm", enabled=False))
    after = graft_state(grouped)
    assert after["rounds"] > before["rounds"]
    assert after["used_by_depth"]["table"] == before["used_by_depth"]["table"]
    assert after["used_by_depth"]["draft"] != before["used_by_depth"]["draft"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grup": "a"}, "custom_params.graft.grup is unknown; allowed are group, enabled"),
        ({"group": "~samples"}, "begin with a letter or digit"),
        ({"group": 3}, "custom_params.graft.group"),
        ({"enabled": "no"}, "custom_params.graft.enabled"),
    ],
)
def test_wrong_settings_are_refused(
    grouped: Server, reference: Reference, settings: dict[str, Any], message: str
) -> None:
    answer = grouped.client.post("/generate", json=said(request(), **settings))
    assert answer.status_code == 400 and message in answer.text
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    answer = grouped.client.post("/v1/chat/completions", json=chat | {"custom_params": {"graft": settings}})
    assert answer.status_code == 400 and message in answer.text
    check(grouped, reference, request())


def test_metrics_say_what_the_status_says(grouped: Server) -> None:
    grouped.generate(said(request(tokens=60), group="metrics"))
    state = graft_state(grouped)
    assert metric(grouped, "rounds_total", state["rounds"], tp_rank="0") == state["rounds"]
    for source in ("draft", "table", "both"):
        for name in ("used", "accepted"):
            total = sum(state[f"{name}_by_depth"][source])
            assert metric(grouped, f"slots_{name}_total", total, source=source) == total
    for stage, count in enumerate(state["stages"]):
        assert metric(grouped, "stage_rounds_total", count, stage=str(stage)) == count
    saved = state["draft_steps"]["saved"]
    assert metric(grouped, "draft_steps_total", saved, outcome="saved") == saved
    hits = round(state["table"]["hit_rate"] * state["rounds"])
    assert metric(grouped, "table_lookups_total", hits, result="hit") == hits > 0
