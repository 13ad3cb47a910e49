"""Which servers are up: as many as memory holds, the least recently used stopped first."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from sgl_graft.bench import client
from sgl_graft.bench.plan import Variant
from sgl_graft.bench.server import ServerProcess

MEMORY_MARGIN_BYTES = 2 << 30


@dataclass(frozen=True)
class PoolOptions:
    logs: Path
    start_timeout_s: float
    warm_up_concurrency: int
    request_timeout_s: float
    max_resident: int | None = None  # None: as many as fit
    command: Sequence[str] | None = None  # instead of `python -m sglang.launch_server`


class ServerPool:
    """Hands out the URL of a variant's server, starting and stopping servers as needed."""

    def __init__(
        self,
        variants: Sequence[Variant],
        server_args: Mapping[str, Sequence[str]],
        options: PoolOptions,
        say: Callable[[str], None],
    ) -> None:
        self._variants = {variant.name: variant for variant in variants}
        self._server_args = server_args
        self._options = options
        self._say = say
        self._servers: dict[str, ServerProcess] = {}  # least recently used first
        self._largest_bytes = 0

    def __enter__(self) -> "ServerPool":
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._servers):
            self._stop(name)

    def url(self, name: str) -> str:
        if (url := self._variants[name].url) is not None:
            return url.rstrip("/")
        if name in self._servers:
            self._servers[name].check_alive()
            self._servers[name] = self._servers.pop(name)
        else:
            self._make_room()
            self._servers[name] = self._start(name)
        return self._servers[name].url

    def holds_all(self, names: Sequence[str]) -> bool:
        """Whether these servers can be up at once; starts the first one to learn how large one is."""
        own = [name for name in names if self._variants[name].url is None]
        if len(own) <= 1:
            return True
        if self._options.max_resident is not None:
            return self._options.max_resident >= len(own)
        self.url(own[0])
        num_missing = sum(name not in self._servers for name in own)
        return psutil.virtual_memory().available >= self._bytes_for(num_missing)

    def log_tail(self, name: str) -> str:
        return self._servers[name].log_tail() if name in self._servers else ""

    def cpu_seconds(self, name: str) -> float | None:
        return self._servers[name].cpu_seconds() if name in self._servers else None

    def idle_cpu_seconds(self, active: str) -> float:
        return sum(server.cpu_seconds() for name, server in self._servers.items() if name != active)

    def _start(self, name: str) -> ServerProcess:
        options = self._options
        log = options.logs / f"{name}-{time.strftime('%H%M%S')}.log"
        server = ServerProcess(name, self._server_args[name], log, options.command)
        try:
            seconds = server.wait_ready(options.start_timeout_s)
            client.warm_up(server.url, options.warm_up_concurrency, options.request_timeout_s)
        except BaseException:
            server.stop()
            raise
        self._largest_bytes = max(self._largest_bytes, server.memory_bytes())
        self._say(
            f"{name}: server ready in {seconds:.0f} s, {server.memory_bytes() / 2**30:.1f} GB, log {log}"
        )
        return server

    def _make_room(self) -> None:
        while self._servers and self._full():
            self._stop(next(iter(self._servers)))

    def _full(self) -> bool:
        limit = self._options.max_resident
        if limit is not None:
            return len(self._servers) >= limit
        return psutil.virtual_memory().available < self._bytes_for(1)

    def _bytes_for(self, num_servers: int) -> int:
        return int(num_servers * self._largest_bytes * 1.25) + MEMORY_MARGIN_BYTES

    def _stop(self, name: str) -> None:
        self._servers.pop(name).stop()
