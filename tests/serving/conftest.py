"""Servers for the whole test session: one per variant and target, started when first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_graft.bench.server import ServerProcess

from . import markov
from .server import Reference, Start, Server
from .variants import PLAIN, SPECULATIVE, VARIANTS, Variant

READY_TIMEOUT_S = 300.0
CONTEXT = 512
# Few enough KV slots that eight long requests at once cannot keep theirs.
TIGHT_POOL = 1400
COMMON = ("--device", "cpu", "--dtype", "float32", "--sleep-on-idle", "--random-seed", "1")
ROOMY = ("--max-total-tokens", "16384", "--context-length", str(CONTEXT))
TIGHT = (
    *("--max-total-tokens", str(TIGHT_POOL), "--context-length", str(CONTEXT)),
    *("--max-running-requests", "8", "--chunked-prefill-size", "64"),
    *("--schedule-conservativeness", "0.05"),  # admit more than the pool holds, so that it retracts
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the tiny targets by family, and of the draft that fits them all."""
    root = tmp_path_factory.mktemp("tiny")
    folders = {family: markov.build_target(root / family, family) for family in markov.ARCHITECTURES}
    return folders | {"draft": markov.build_draft(root / "draft")}


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a server with the session's common flags; all are ended with the session."""
    logs = tmp_path_factory.mktemp("server-logs")
    started: list[Server] = []

    def start(name: str, model: Path, *args: str) -> Server:
        flags = ["--model-path", str(model), *COMMON, *args]
        process = ServerProcess(name, flags, logs / f"{len(started)}-{name}.log")
        started.append(Server(process, model))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def tiny_server(start_server: Start, tiny: dict[str, Path]) -> Any:
    """The server of a variant on the tiny Llama target; asking for one starts all, so they start together."""
    servers: dict[str, Server] = {}

    def server_of(variant: Variant) -> Server:
        if not servers:
            for each in VARIANTS.values():
                room = ROOMY if each is PLAIN else TIGHT
                args = (*room, *each.args(str(tiny["draft"])))
                servers[each.name] = start_server(f"tiny-{each.name}", tiny["llama"], *args)
        servers[variant.name].process.wait_ready(READY_TIMEOUT_S)
        return servers[variant.name]

    return server_of


@pytest.fixture(scope="session")
def reference(tiny_server: Any) -> Reference:
    """Plain decoding on the tiny target, with room for everything."""
    return Reference(tiny_server(PLAIN))


@pytest.fixture(scope="session", params=SPECULATIVE, ids=lambda variant: variant.name)
def speculative(request: pytest.FixtureRequest, tiny_server: Any) -> Server:
    """A speculative server on the tiny target, with a tight pool and prompts prefilled in chunks."""
    server: Server = tiny_server(request.param)
    return server
