"""One `sglang.launch_server` process: its own process group, port and log; nothing of it survives `stop`."""

import contextlib
import ctypes
import fcntl
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import httpx
import psutil

from sgl_graft.bench.client import ServerError
from sgl_graft.cli.serve import launch_command

LOG_TAIL_LINES = 40
STOP_GRACE_S = 15.0
SERVER_PORTS = (20000, 30000)  # below 30000, `make serve`'s, and Linux's ephemeral range from 32768 on
PR_SET_PDEATHSIG = 1


class ServerProcess:
    """A started server; use as a context manager or call `stop`."""

    def __init__(
        self, name: str, args: Sequence[str], log: Path, command: Sequence[str] | None = None
    ) -> None:
        port = free_port()
        self.name = name
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        launcher = command or launch_command(())
        self.command = [*launcher, *args, "--host", "127.0.0.1", "--port", str(port)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            output.write(shlex.join(self.command) + "\n")
            output.flush()
            self._process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float, on_wait: Callable[[float], None] = lambda seconds: None) -> float:
        """Wait until a request goes through; returns the seconds it took."""
        start = time.monotonic()
        while (waited := time.monotonic() - start) < timeout_s:
            self.check_alive()
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.url}/health_generate", timeout=30, trust_env=False)
                if answer.status_code == 200:
                    return waited
            on_wait(waited)
            time.sleep(0.5)
        raise ServerError(f"the {self.name} server was not ready after {timeout_s:.0f} s; {self.log_tail()}")

    def check_alive(self) -> None:
        if (code := self._process.poll()) is not None:
            cause = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            raise ServerError(f"the {self.name} server {cause}; {self.log_tail()}")

    def log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"its log {self.log} ends:", *lines])

    def tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_seconds(self) -> float:
        """CPU time of the whole process tree so far, children that have ended included."""
        total = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def memory_bytes(self) -> int:
        """Memory that stopping this server would free, as near as the platform tells."""
        total = 0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().uss
        return total

    def stop(self) -> None:
        """End the whole group: politely, then not."""
        members = list({*self.tree(), *_group_members(self._process.pid)})
        _signal_group(self._process.pid, signal.SIGTERM)
        if alive := self._wait_gone(members):
            _signal_group(self._process.pid, signal.SIGKILL)
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._wait_gone(alive)

    def _wait_gone(self, processes: Sequence[psutil.Process]) -> list[psutil.Process]:
        """The ones still running after the grace period."""
        deadline = time.monotonic() + STOP_GRACE_S
        alive = list(processes)
        while alive and time.monotonic() < deadline:
            self._process.poll()  # reaps the launcher
            alive = [process for process in alive if _is_alive(process)]
            time.sleep(0.05)
        return alive


def _group_members(leader: int) -> list[psutil.Process]:
    """What is left of a group, its leader perhaps gone already."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == leader:
                members.append(process)
    return members


def _is_alive(process: psutil.Process) -> bool:
    """A zombie counts as gone: where no init reaps orphans, the server's children stay zombies for good."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _die_with_parent() -> None:
    """A bench killed outright must not leave a server holding the machine."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A port that nothing uses, and that the kernel will not hand to an outgoing connection either.

    A server takes seconds to bind the port it was given. A port out of the ephemeral range could meanwhile
    become the local end of somebody's connection, and the server would die of it.
    """
    while True:
        port = random.randrange(*SERVER_PORTS)
        if not _claim(port):
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_claimed: dict[int, IO[str]] = {}  # held as long as this process lives


def _claim(port: int) -> bool:
    """Whether this process may use the port: another one may have chosen it and not bound it yet."""
    folder = Path(tempfile.gettempdir()) / f"sgl_graft_ports_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = (folder / str(port)).open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _claimed[port] = file
    return True
