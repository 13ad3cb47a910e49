"""Servers for the whole test session: one per variant and target, started when first asked for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest

from sgl_graft import models
from sgl_graft.bench.server import ServerProcess

from . import markov
from .kit_table import EMBEDDED, TINY, WIDE, KitRun
from .server import Reference, Server, Start
from .variants import EAGLE_TREE, PLAIN, SPECULATIVE, Variant

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
    ours = [item for item in items if here in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.server)
        run, variant = _kit_of(item), _variant_of(item)
        if (variant and variant.soak) or (run and _is_long(run, item.name, variant)):
            item.add_marker(pytest.mark.soak)
    # One variant after the other on each target, so that its server is started once.
    ours.sort(key=_server_order)
    others = [item for item in items if item not in ours]
    items[:] = others + ours


def _is_long(run: KitRun, test: str, variant: Variant | None) -> bool:
    # A server of the embedded model per variant would take minutes: `make test` has one.
    elsewhere = run.target == EMBEDDED and variant is not EAGLE_TREE
    return elsewhere or run.own_server or test in run.soak


def _kit_of(item: pytest.Item) -> KitRun | None:
    return getattr(getattr(item, "cls", None), "kit_run", None)


def _variant_of(item: pytest.Item) -> Variant | None:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    of_class = getattr(getattr(item, "cls", None), "variant", None)
    variant: Variant | None = parameters.get("speculative", of_class)
    return variant


def _server_order(item: pytest.Item) -> tuple[int, bool, int]:
    run, variant = _kit_of(item), _variant_of(item)
    place = 1 if run is not None and run.target == EMBEDDED else 0
    own = run is not None and run.own_server
    return place, own, SPECULATIVE.index(variant) if variant else -1


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the tiny targets by family, and of the drafts that fit them all."""
    from tests.specblock import markov_draft  # transformers: seconds to import

    root = tmp_path_factory.mktemp("tiny")
    folders = {family: markov.build_target(root / family, family) for family in markov.ARCHITECTURES}
    drafts = {"draft": markov.build_draft(root / "draft"), "dflash": markov.build_dflash(root / "dflash")}
    return folders | drafts | {"specblock": markov_draft.build_draft(root / "specblock")}


@pytest.fixture(scope="session")
def trained_draft(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 draft trained on what the tiny Llama target writes."""
    from .trained_draft import train_draft  # transformers: seconds to import

    return train_draft(tiny["llama"], tmp_path_factory.mktemp("trained"))


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


class CurrentServer:
    """The server of the variant asked for last.

    Servers are large, so there is one at a time, of whatever kind: the one before is stopped.
    """

    _running: ClassVar[dict[object, Server]] = {}

    def __init__(self, start: Callable[[Variant], Server]) -> None:
        self._start = start

    def begin(self, variant: Variant) -> Server:
        """Start the variant's server without waiting for it."""
        key = (self, variant)
        if key not in self._running:
            while self._running:
                self._running.popitem()[1].stop()
            self._running[key] = self._start(variant)
        return self._running[key]

    def __call__(self, variant: Variant) -> Server:
        server = self.begin(variant)
        server.process.wait_ready(READY_TIMEOUT_S)
        return server


@pytest.fixture(scope="session")
def tiny_server(start_server: Start, tiny: dict[str, Path]) -> CurrentServer:
    """The speculative server of a variant on the tiny Llama target, with a tight pool and chunked prefill."""

    def start(variant: Variant) -> Server:
        args = (*TIGHT, *variant.args(str(tiny[variant.draft])))
        # Several servers on few cores: threads that wait for each other would only spin.
        return start_server(f"tiny-{variant.name}", tiny["llama"], *args, OMP_NUM_THREADS="1")

    return CurrentServer(start)


@pytest.fixture(scope="session")
def reference_server(start_server: Start, tiny: dict[str, Path]) -> Server:
    """Plain decoding on the tiny target, with room for everything; not yet ready when it is returned."""
    return start_server("tiny-none", tiny["llama"], *ROOMY, OMP_NUM_THREADS="1")


@pytest.fixture(scope="session")
def reference(reference_server: Server) -> Reference:
    """Answers of plain decoding on the tiny target."""
    reference_server.process.wait_ready(READY_TIMEOUT_S)
    return Reference(reference_server)


@pytest.fixture(scope="session", params=SPECULATIVE, ids=lambda variant: variant.name)
def speculative(
    request: pytest.FixtureRequest, tiny_server: CurrentServer, reference_server: Server
) -> Server:
    """A speculative server on the tiny target; it starts beside plain decoding's."""
    return tiny_server(request.param)


@pytest.fixture(scope="session")
def embedded_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft that ships for the embedded model; a random one in a checkout that has none yet."""
    shipped = models.path("smollm2-135m-instruct-eagle3")
    if (shipped / "config.json").is_file():
        return shipped
    from sgl_graft.models import tiny  # transformers: seconds to import

    folder = tmp_path_factory.mktemp("draft") / "random"
    return tiny.build_draft(folder, models.get("smollm2-135m-instruct"), draft_vocab_size=8192)


@pytest.fixture(scope="session")
def embedded_dflash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for DFlash."""
    shipped = models.path("smollm2-135m-instruct-dflash")
    if (shipped / "config.json").is_file():
        return shipped
    from sgl_graft.models import tiny  # transformers: seconds to import

    folder = tmp_path_factory.mktemp("draft") / "random-dflash"
    return tiny.build_dflash(folder, models.get("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def embedded_specblock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for SpecBlock."""
    shipped = models.path("smollm2-135m-instruct-specblock")
    if (shipped / "config.json").is_file():
        return shipped
    from tests.specblock import markov_draft  # transformers: seconds to import

    folder = tmp_path_factory.mktemp("draft") / "random-specblock"
    return markov_draft.build_random(folder, models.get("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def embedded_server(start_server: Start, request: pytest.FixtureRequest) -> CurrentServer:
    """The server of a variant on the embedded model."""

    def start(variant: Variant) -> Server:
        kind = "embedded_draft" if variant.draft == "draft" else f"embedded_{variant.draft}"
        draft = request.getfixturevalue(kind) if variant is not PLAIN else ""
        target = models.get("smollm2-135m-instruct")
        return start_server(f"smollm2-{variant.name}", target, *ROOMY, *variant.args(str(draft)))

    return CurrentServer(start)


@pytest.fixture(scope="session")
def kit_server(
    start_server: Start,
    tiny: dict[str, Path],
    tiny_server: CurrentServer,
    embedded_server: CurrentServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[KitRun, Variant], Server]:
    """The server that one of upstream's test kits runs against."""
    own: dict[str, CurrentServer] = {}

    @functools.cache
    def wide(part: str) -> Path:
        return markov.widen(tiny[part], tmp_path_factory.mktemp("wide") / part)

    def server_of(run: KitRun, variant: Variant) -> Server:
        if not run.own_server:
            return (tiny_server if run.target == TINY else embedded_server)(variant)

        def start(variant: Variant) -> Server:
            folder = wide if run.target == WIDE else tiny.__getitem__
            args = (*ROOMY, *variant.args(str(folder(variant.draft))), *run.flags)
            name = f"kit-{run.name}-{variant.name}"
            return start_server(name, folder("llama"), *args, OMP_NUM_THREADS="1", **run.environment)

        return own.setdefault(run.name, CurrentServer(start))(variant)

    return server_of
