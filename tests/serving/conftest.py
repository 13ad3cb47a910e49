"""Servers for the whole test session: one per variant and target, started when first asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sgl_graft import models
from sgl_graft.bench.server import ServerProcess
from sgl_graft.models import tiny as random_models

from . import markov
from .kit_table import TINY, KitRun
from .server import Reference, Server, Start
from .variants import PLAIN, SPECULATIVE, VARIANTS, Variant

READY_TIMEOUT_S = 300.0
COMMON = ("--device", "cpu", "--dtype", "float32", "--random-seed", "1")
ROOMY = ("--max-total-tokens", "32768")
# Fewer KV slots than eight long requests need, and admission that does not mind: such a server retracts.
TIGHT = (
    *("--max-total-tokens", "4096", "--max-running-requests", "8", "--chunked-prefill-size", "64"),
    *("--schedule-conservativeness", "0.05"),
)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.server)
        run = getattr(getattr(item, "cls", None), "kit_run", None)
        if run is not None and (run.own_server or item.name in run.soak):
            item.add_marker(pytest.mark.soak)


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

    def start(name: str, model: Path, *args: str, **environment: str) -> Server:
        flags = ["--model-path", str(model), *COMMON, *args]
        with mock.patch.dict(os.environ, environment):
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
                # Several servers on few cores: threads that wait for each other would only spin.
                servers[each.name] = start_server(
                    f"tiny-{each.name}", tiny["llama"], *args, OMP_NUM_THREADS="1"
                )
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


@pytest.fixture(scope="session")
def embedded_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft that ships for the embedded model; a random one in a checkout that has none yet."""
    shipped = models.path("smollm2-135m-instruct-eagle3")
    if (shipped / "config.json").is_file():
        return shipped
    folder = tmp_path_factory.mktemp("draft") / "random"
    return random_models.build_draft(folder, models.get("smollm2-135m-instruct"), draft_vocab_size=8192)


@pytest.fixture(scope="session")
def embedded_server(start_server: Start, request: pytest.FixtureRequest) -> Any:
    """The server of a variant on the embedded model. Only the one asked for last is kept: they are large."""
    running: dict[str, Server] = {}

    def server_of(variant: Variant) -> Server:
        if variant.name not in running:
            while running:
                running.popitem()[1].stop()
            draft = request.getfixturevalue("embedded_draft") if variant is not PLAIN else ""
            args = (*ROOMY, *variant.args(str(draft)))
            target = models.get("smollm2-135m-instruct")
            running[variant.name] = start_server(f"smollm2-{variant.name}", target, *args)
        running[variant.name].process.wait_ready(READY_TIMEOUT_S)
        return running[variant.name]

    return server_of


@pytest.fixture(scope="session")
def kit_server(start_server: Start, tiny: dict[str, Path], tiny_server: Any, embedded_server: Any) -> Any:
    """The server that one of upstream's test kits runs against."""
    own: dict[tuple[str, str], Server] = {}

    def server_of(run: KitRun, variant: Variant) -> Server:
        if not run.own_server:
            server: Server = (tiny_server if run.target == TINY else embedded_server)(variant)
            return server
        key = (run.name, variant.name)
        if key not in own:
            while own:
                own.popitem()[1].stop()
            args = (*ROOMY, *variant.args(str(tiny["draft"])), *run.flags)
            name = f"kit-{run.name}-{variant.name}"
            own[key] = start_server(name, tiny["llama"], *args, OMP_NUM_THREADS="1", **run.environment)
        own[key].process.wait_ready(READY_TIMEOUT_S)
        return own[key]

    return server_of
