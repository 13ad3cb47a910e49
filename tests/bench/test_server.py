import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from sgl_graft.bench.client import ServerError
from sgl_graft.bench.server import ServerProcess

from .conftest import FAKE_COMMAND


def test_a_killed_server_is_named_and_its_children_are_not_left(tmp_path: Path) -> None:
    with ServerProcess("EAGLE3", ["--fake-child"], tmp_path / "log", FAKE_COMMAND) as server:
        assert server.wait_ready(30) >= 0
        server.check_alive()
        launcher, child = server.tree()
        assert server.memory_bytes() > 1 << 20
        os.kill(launcher.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        with pytest.raises(ServerError, match="the EAGLE3 server was killed by signal 9"):
            while time.monotonic() < deadline:
                server.check_alive()
                time.sleep(0.01)
        assert child.is_running()
    # The group outlives its leader; stop ends it all the same (where no init reaps it, a zombie stays).
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_server_that_never_answers_times_out(tmp_path: Path) -> None:
    mute = ("python3", "-c", "import time; print('busy loading', flush=True); time.sleep(60)")
    with (
        ServerProcess("none", [], tmp_path / "log", mute) as server,
        pytest.raises(ServerError, match=r"(?s)not ready after 1 s.*busy loading"),
    ):
        server.wait_ready(1.0)
    assert not server.tree()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) != 0
