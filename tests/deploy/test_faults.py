"""Every alert is seen to fire: a real Prometheus over a real server with a fault.

The rules are the rendered ones with their windows shortened and no `for` (`prometheus.hurried`): a test of
minutes cannot wait for quarters of an hour. That they wait is what promtool tests (test_alerts.py).
"""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_graft import models

from .cases import CPU, STATE, WATCHED, speculative
from .chart import merged, render
from .pod import LocalPod, Stream, cpu_pod, eventually
from .prometheus import Prometheus, hurried, needs_prometheus, prometheus, rules_of

pytestmark = [pytest.mark.server, pytest.mark.soak, needs_prometheus]

IMPATIENT = {"probes": {"healthCheckTimeoutSeconds": 5, "liveness": {"timeoutSeconds": 10}}}
STARVED = merged(
    CPU,
    WATCHED,
    IMPATIENT,
    speculative("EAGLE3"),
    {
        "draft": {"path": "/opt/sgl-graft/drafts/noise"},
        "model": {"contextLength": 1024},
        "maxTotalTokens": 1100,
        "maxRunningRequests": 4,
        # Admits requests as if they would end early, so that the pool runs out while they run.
        "extraArgs": ["--schedule-conservativeness", "0.05", "--decode-log-interval", "1"],
        "metrics": {"rules": {"retractRate": 0.01, "queueSeconds": 5}},
    },
)
FORGETFUL = merged(CPU, WATCHED, STATE, {"state": {"type": "emptyDir", "saveEverySeconds": 1}})


def noise_draft(folder: Path) -> Path:
    """The shipped draft with random weights: right in shape, never right in what it says."""
    shipped = Path(models.get("smollm2-135m-instruct-eagle3"))
    folder.mkdir()
    shutil.copy(shipped / "config.json", folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(shipped / "model.safetensors")
    noise = {
        name: torch.randn(value.shape, generator=generator).to(value.dtype) * 0.05
        if value.is_floating_point()
        else value
        for name, value in weights.items()
    }
    save_file(noise, folder / "model.safetensors")
    return folder


def wait_for(server: Prometheus, wanted: set[str], seconds: float, meanwhile: Callable[[], object]) -> None:
    """Until every wanted alert has fired, at whatever time."""
    seen: set[str] = set()

    def look() -> bool:
        meanwhile()
        seen.update(server.firing())
        return wanted <= seen

    try:
        eventually(look, seconds, every=1)
    except AssertionError as error:
        raise AssertionError(f"fired {sorted(seen)}, never {sorted(wanted - seen)}") from error
    print("fired:", sorted(seen))


def scheduler_of(pod: LocalPod) -> psutil.Process:
    (found,) = [process for process in pod.tree() if "scheduler" in " ".join(process.cmdline())]
    return found


def test_a_starved_server_with_a_useless_draft(tmp_path: Path) -> None:
    pod = cpu_pod(STARVED, tmp_path / "pod", noise=noise_draft(tmp_path / "noise"))
    pod.start()
    try:
        pod.wait_started()
        with prometheus(pod.port, hurried(rules_of(render(STARVED))), tmp_path) as server:
            eventually(lambda: server.query("up == 1"), 60)
            assert server.firing() == set()
            streams = [Stream(pod, 330, f"Chapter {number}.") for number in range(12)]
            wait_for(
                server,
                {
                    "SglGraftQueueSlow",
                    "SglGraftKvCacheFull",
                    "SglGraftRetracting",
                    "SglGraftAcceptLengthCollapsed",
                },
                500,
                lambda: None,
            )
            for stream in streams:
                stream.thread.join(300)
                assert stream.done and stream.tokens == 330, stream.error

            scheduler = scheduler_of(pod)
            scheduler.send_signal(signal.SIGSTOP)  # a hung scheduler: no token comes back
            wait_for(server, {"SglGraftHealthFailing"}, 120, lambda: pod.probe("livenessProbe"))
            scheduler.send_signal(signal.SIGCONT)

            pod.kill()
            wait_for(server, {"SglGraftDown", "SglGraftReplicaDown"}, 60, lambda: None)
    finally:
        pod.kill()


def test_a_server_that_restarts_over_a_damaged_table(tmp_path: Path) -> None:
    pod = cpu_pod(FORGETFUL, tmp_path / "pod")
    state = tmp_path / "pod" / "state"
    (state / "successors.table").write_bytes(b"not a table")
    rules = hurried(rules_of(render(FORGETFUL)))
    # Starts take half a minute each here: the window of the restart rule must hold four of them.
    for rule in rules["groups"][0]["rules"]:
        if rule["alert"] == "SglGraftRestartLoop":
            rule["expr"] = rule["expr"].replace("[45s]", "[20m]")
    try:
        pod.start()
        pod.wait_started()
        with prometheus(pod.port, rules, tmp_path) as server:
            pod.generate(8)
            wait_for(server, {"SglGraftTableSetAside"}, 60, lambda: pod.generate(8))
            for item in state.iterdir():
                item.unlink()
            state.rmdir()
            wait_for(server, {"SglGraftTableSaveFailing"}, 90, lambda: pod.generate(8))
            state.mkdir()
            for _ in range(3):
                pod.kill()
                pod.start()
                pod.wait_started()
                started = pod.total("sglang:startup_time_seconds")
                eventually(
                    lambda started=started: (
                        abs(
                            sum(
                                float(item["value"][1])
                                for item in server.query("sglang:startup_time_seconds")
                            )
                            - started
                        )
                        < 1e-6
                    ),
                    30,
                )
            wait_for(server, {"SglGraftRestartLoop"}, 30, lambda: None)
    finally:
        pod.kill()
