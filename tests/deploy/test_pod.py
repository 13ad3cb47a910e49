"""The pod of CPU mode as real processes: command, environment, probes and preStop as they are rendered."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .cases import CPU, STATE, WATCHED
from .chart import merged, only, render
from .pod import LocalPod, Stream, cpu_pod, eventually
from .prometheus import needs_prometheus, prometheus, rules_of
from .series import selectors
from .test_observation import BOARD, PANELS

pytestmark = [pytest.mark.server, pytest.mark.soak]

VALUES = merged(
    CPU,
    STATE,
    WATCHED,
    {"state": {"type": "emptyDir", "saveEverySeconds": 3}, "drain": {"preStopSeconds": 5}},
)
# Series that SGLang or GRAFT makes only once something of the kind has happened.
ONLY_AFTER_AN_EVENT = {"sglang:num_retracted_requests_total", "sglang:num_aborted_requests_total"}
OF_OTHER_ALGORITHMS = {
    "sgl_graft:block_rounds_total",
    "sgl_graft:draft_version",
    "sgl_graft:adaptation_decisions_total",
    "sgl_graft:adaptation_setbacks_total",
    "sgl_graft:adaptation_swap_seconds_total",
    "sgl_graft:adaptation_wanted_ranks_total",
}
MISSING = ONLY_AFTER_AN_EVENT | OF_OTHER_ALGORITHMS


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPod]:
    pod = cpu_pod(VALUES, tmp_path_factory.mktemp("pod"))
    pod.start()
    try:
        pod.wait_started()
        yield pod
    finally:
        pod.kill()


def test_started_within_the_budget(pod: LocalPod) -> None:
    budget = pod.container["startupProbe"]
    print(f"started after {pod.started_after:.0f} s")
    assert pod.started_after < budget["periodSeconds"] * budget["failureThreshold"]


def test_probes_answer_in_time(pod: LocalPod) -> None:
    ready, alive = pod.probe("readinessProbe"), pod.probe("livenessProbe")
    print(f"/ready {ready}, /health {alive}")
    assert ready.passed and alive.passed
    assert alive.seconds > 0.9, "the Kubernetes default timeout of 1 s would do; the chart's comment is wrong"


def test_probes_answer_under_load(pod: LocalPod) -> None:
    threads = [threading.Thread(target=pod.generate, args=(96, f"Story {i}:")) for i in range(8)]
    for thread in threads:
        thread.start()
    results = []
    while any(thread.is_alive() for thread in threads):
        results.append((pod.probe("readinessProbe"), pod.probe("livenessProbe")))
    print("under load:", [(round(a.seconds, 2), round(b.seconds, 2)) for a, b in results])
    assert results and all(ready.passed and alive.passed for ready, alive in results)


def test_the_helm_test_pod_passes_and_can_fail(pod: LocalPod) -> None:
    (container,) = only(render(VALUES), "Pod")["spec"]["containers"]
    url = f"http://127.0.0.1:{pod.port}"
    done = pod.run(container, CHAT_URL=url, METRICS_URL=url + "/metrics")
    assert done.returncode == 0, done.stdout + done.stderr
    # A page without the series: what a server without speculation would show.
    failed = pod.run(container, CHAT_URL=url, METRICS_URL=url + "/v1/models")
    assert failed.returncode != 0 and "speculation is not running" in failed.stderr


def test_every_series_that_is_read_is_served(pod: LocalPod) -> None:
    served = {
        line.split("{")[0].split(" ")[0] for line in pod.metrics().splitlines() if not line.startswith("#")
    }
    rules = only(render(VALUES), "PrometheusRule")["spec"]["groups"][0]["rules"]
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    queries = [query.replace("$__rate_interval", "1m") for query in queries] + [
        rule["expr"] for rule in rules
    ]
    read_names = {selector.name for query in queries for selector in selectors(query)} - {"up"}
    assert read_names - served <= MISSING


@needs_prometheus
def test_prometheus_fills_every_panel_and_runs_every_rule(pod: LocalPod, tmp_path: Path) -> None:
    with prometheus(pod.port, rules_of(render(VALUES)), tmp_path) as server:
        eventually(lambda: server.query("up == 1"), 60)
        variables = {"$__rate_interval": "60s", "$namespace": "llm", "$service": "demo-sgl-graft"}
        empty: dict[str, set[str]] = {}

        def filled() -> bool:
            """Whether every panel shows something that it can show here."""
            pod.generate(32)
            empty.clear()
            for panel in PANELS:
                for item in panel["targets"]:
                    query = item["expr"]
                    for name, value in variables.items():
                        query = query.replace(name, value)
                    if not server.query(query):
                        empty[panel["title"]] = {selector.name for selector in selectors(query)}
            return all(names & MISSING for names in empty.values())

        try:
            eventually(filled, 180)
        finally:
            print("empty panels:", empty)
        for variable in BOARD["templating"]["list"][1:]:
            series = re.split(r"[{,]", variable["query"]["query"].removeprefix("label_values("))[0]
            assert server.query(series), variable["name"]
        (group,) = server.ask("rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}, group
        assert server.firing() == set()


def test_sigterm_under_load_ends_every_request_and_keeps_the_table(pod: LocalPod) -> None:
    """Last: it ends the server, then starts it again on the same volumes."""
    eventually(lambda: pod.total("sgl_graft:table_saves_total") > 0, 30)
    rows_before = pod.total("sgl_graft:table_rows_filled")
    streams = [Stream(pod, 160) for _ in range(6)]
    eventually(lambda: all(stream.chunks for stream in streams), 60)

    slept = pod.pre_stop()
    assert abs(slept - 5) < 1
    late = Stream(pod, 8)  # routing lags behind: requests still come while preStop sleeps
    eventually(lambda: late.chunks, 60)

    processes = pod.tree()
    begin = time.monotonic()
    pod.terminate()
    eventually(lambda: pod.probe("readinessProbe").status == 503, 10)
    print(f"/ready is 503 {time.monotonic() - begin:.1f} s after SIGTERM")
    assert pod.probe("livenessProbe").status == 503
    grace = pod.spec["terminationGracePeriodSeconds"] - slept
    code = pod.wait_ended(grace)
    print(f"ended with {code} {time.monotonic() - begin:.1f} s after SIGTERM, grace {grace:.0f} s")
    assert code == 0, pod.log_tail()
    for stream in [*streams, late]:
        stream.thread.join(10)
        assert stream.error is None and stream.done, stream.error
        assert stream.finish and stream.finish["type"] == "length"
    assert [stream.tokens for stream in streams] == [160] * 6
    eventually(lambda: not any(_runs(process) for process in processes), 20)

    (table,) = [file for file in (pod.folder / "state").iterdir() if not file.name.endswith(".tmp")]
    assert table.stat().st_mode & 0o077 == 0
    pod.start()
    pod.wait_started()
    assert pod.total("sgl_graft:tables_set_aside_total") == 0
    eventually(lambda: pod.total("sgl_graft:table_rows_filled") > 0, 30)
    rows_after = pod.total("sgl_graft:table_rows_filled")
    print(f"table rows before {rows_before:.0f}, after the restart {rows_after:.0f}")
    assert rows_after >= 0.9 * rows_before


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
