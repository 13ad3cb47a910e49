"""Damaged bodies for our routes and our request fields: refused with a 4xx, or answered; never a 5xx."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.fuzz.cases import mutated

from .payloads import PROMPTS, check, request
from .server import Reference, Server
from .variants import SPECULATIVE

GRAFT, BLOCKPILOT = (
    next(variant for variant in SPECULATIVE if variant.name == name) for name in ("graft", "blockpilot")
)
EACH = 40
SOAK_EACH = 1500
SETTINGS = {
    "graft": {"group": "team", "enabled": True},
    "blockpilot": {"block_size": 3, "speculate": True},
}
ROUTES = {
    "table/save": {"name": "fuzzed"},
    "table/load": {"name": "fuzzed"},
    "calibrate": {"rounds": 3},
    "adaptation/rollback": {"domain": "a"},
}


def bodies(settings: Any) -> dict[str, dict[str, Any]]:
    """Requests that carry our fields, by path."""
    chat = [{"role": "user", "content": "a"}]
    common = {"model": "m", "max_tokens": 3, "custom_params": {"graft": settings}}
    return {
        "/generate": {
            "text": "The ",
            "sampling_params": {"max_new_tokens": 3, "custom_params": {"graft": settings}},
        },
        "/v1/completions": common | {"prompt": "The "},
        "/v1/chat/completions": common | {"messages": chat},
    }


def sent(server: Server, path: str, body: Any) -> int:
    """Status of a body that may hold what JSON does not have."""
    text = json.dumps(body).encode("utf-8", "surrogatepass")
    answer = server.client.post(path, content=text, headers={"Content-Type": "application/json"})
    return answer.status_code


def hit(server: Server, name: str, first: int, number: int) -> list[tuple[str, int, int]]:
    """(path, seed, status) of every case that ended in a server error."""
    found = []
    for seed in range(first, first + number):
        rng = random.Random(seed)
        settings = mutated(rng, SETTINGS[name])
        path, body = rng.choice(list(bodies(settings).items()))
        found.append((path, seed, sent(server, path, body)))
        route = rng.choice(list(ROUTES))
        found.append((route, seed, sent(server, f"/graft/{route}", mutated(rng, ROUTES[route]))))
    return [case for case in found if case[2] >= 500]


@pytest.mark.soak
@pytest.mark.parametrize("speculative", [GRAFT, BLOCKPILOT], ids=lambda variant: variant.name, indirect=True)
def test_no_body_is_a_server_error(speculative: Server, reference: Reference, request_name: str) -> None:
    assert not hit(speculative, request_name, 0, EACH)
    assert speculative.poll() is None
    check(speculative, reference, request(PROMPTS[0]))


@pytest.mark.soak
@pytest.mark.parametrize("speculative", [GRAFT, BLOCKPILOT], ids=lambda variant: variant.name, indirect=True)
def test_no_body_of_many_is_a_server_error(
    speculative: Server, reference: Reference, request_name: str
) -> None:
    assert not hit(speculative, request_name, 5000, SOAK_EACH)
    check(speculative, reference, request(PROMPTS[0]))


@pytest.fixture
def request_name(request: pytest.FixtureRequest) -> str:
    """Name of the variant that the test runs on."""
    name: str = request.node.callspec.params["speculative"].name
    return name
