"""Each alert fires when it should and only then: Prometheus' own rule tester over the rendered rules.

Needs `promtool` (Debian: `apt-get install prometheus`); skipped without it.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from .cases import GOOD, speculative
from .chart import merged, only, render

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus"
)
TARGET = 'namespace="llm", service="demo-sgl-graft", pod="p0"'
ENGINE = f'{TARGET}, tp_rank="0"'


@dataclass(frozen=True)
class Case:
    """Series of a server in trouble, minute by minute; when the alert is still quiet, and when it fires."""

    series: dict[str, str]
    quiet_at: str
    fires_at: str
    severity: str = "warning"


HEALTHY = {
    f"up{{{TARGET}}}": "1x120",
    f'sglang:startup_time_seconds{{{TARGET}, phase="tokenizer_e2e"}}': "31x120",
    f'sglang:http_responses_total{{{TARGET}, endpoint="/health", status_code="200"}}': "0+4x120",
    f'sglang:generation_tokens_total{{{TARGET}, is_streaming="true"}}': "0+2600x120",
    f'sglang:num_requests_total{{{TARGET}, is_streaming="true"}}': "0+10x120",
    f"sglang:spec_verify_calls_total{{{TARGET}}}": "0+1000x120",
    f'sglang:queue_time_seconds_bucket{{{ENGINE}, le="1"}}': "0+10x120",
    f'sglang:queue_time_seconds_bucket{{{ENGINE}, le="20"}}': "0+10x120",
    f'sglang:queue_time_seconds_bucket{{{ENGINE}, le="+Inf"}}': "0+10x120",
    f"sglang:token_usage{{{ENGINE}}}": "0.7x120",
    f"sglang:num_retracted_requests_total{{{ENGINE}}}": "0x120",
    f"sgl_graft:tables_set_aside_total{{{ENGINE}}}": "0x120",
    f'sgl_graft:table_saves_total{{{ENGINE}, result="failed"}}': "0x120",
    f'sgl_graft:table_saves_total{{{ENGINE}, result="ok"}}': "0+1x120",
}
TROUBLE = {
    "SglGraftDown": Case({f"up{{{TARGET}}}": "1x9 0x110"}, "14m", "16m", "critical"),
    "SglGraftReplicaDown": Case({f"up{{{TARGET}}}": "1x9 0x110"}, "14m", "16m"),
    "SglGraftRestartLoop": Case(
        {f'sglang:startup_time_seconds{{{TARGET}, phase="tokenizer_e2e"}}': "31x4 32x4 33x4 34x100"},
        "12m",
        "16m",
        "critical",
    ),
    "SglGraftHealthFailing": Case(
        {f'sglang:http_responses_total{{{TARGET}, endpoint="/health", status_code="503"}}': "0x9 1+2x110"},
        "10m",
        "16m",
    ),
    "SglGraftAcceptLengthCollapsed": Case(
        {
            f'sglang:generation_tokens_total{{{TARGET}, is_streaming="true"}}': "0+1010x120",
            f'sglang:num_requests_total{{{TARGET}, is_streaming="true"}}': "0+10x120",
            f"sglang:spec_verify_calls_total{{{TARGET}}}": "0+1000x120",
        },
        "14m",
        "20m",
    ),
    "SglGraftQueueSlow": Case(
        {f'sglang:queue_time_seconds_bucket{{{ENGINE}, le="1"}}': "0+5x120"}, "9m", "20m"
    ),
    "SglGraftKvCacheFull": Case({f"sglang:token_usage{{{ENGINE}}}": "0.97x120"}, "9m", "11m"),
    "SglGraftRetracting": Case({f"sglang:num_retracted_requests_total{{{ENGINE}}}": "0+12x120"}, "9m", "25m"),
    # A new pod: its series begins with 1.
    "SglGraftTableSetAside": Case(
        {f"sgl_graft:tables_set_aside_total{{{ENGINE}}}": "_x9 1x110"}, "8m", "12m"
    ),
    "SglGraftTableSaveFailing": Case(
        {f'sgl_graft:table_saves_total{{{ENGINE}, result="failed"}}': "0x9 1+1x110"}, "8m", "12m"
    ),
    "SglGraftAdaptationSetbacks": Case(
        {f'sgl_graft:adaptation_setbacks_total{{{ENGINE}, kind="rolled_back"}}': "0x9 0+1x110"}, "14m", "18m"
    ),
}


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rendered rules, GRAFT's and what SPECBLOCK has beside them, as a rule file of Prometheus."""
    spec, other = (
        only(render(values), "PrometheusRule")["spec"]
        for values in (GOOD["watched"], merged(GOOD["watched"], speculative("SPECBLOCK")))
    )
    (group,), (others,) = spec["groups"], other["groups"]
    known = {rule["alert"] for rule in group["rules"]}
    group["rules"] += [rule for rule in others["rules"] if rule["alert"] not in known]
    file = tmp_path_factory.mktemp("rules") / "rules.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


def promtool(*words: str | Path) -> str:
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def firing(alert: str, series: dict[str, str], when: dict[str, int], severity: str = "") -> dict[str, Any]:
    """A test of promtool: how many instances of an alert fire at each time, given the series."""
    severity = severity and f', severity="{severity}"'
    expression = f'count by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"{severity}}})'
    sample = {"labels": f'{{alertname="{alert}"}}'}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": time,
                "exp_samples": [sample | {"value": count}] if count else [],
            }
            for time, count in when.items()
        ],
    }


def run(rules: Path, *tests: dict[str, Any]) -> None:
    file = rules.with_name("tests.yaml")
    whole = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": list(tests)}
    file.write_text(yaml.safe_dump(whole))
    promtool("test", "rules", file)


def test_every_alert_has_a_case(rules: Path) -> None:
    (group,) = yaml.safe_load(rules.read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == set(TROUBLE)


@needs_promtool
def test_prometheus_reads_the_rules(rules: Path) -> None:
    assert f"{len(TROUBLE)} rules found" in promtool("check", "rules", rules)


@needs_promtool
def test_each_fires_in_trouble_and_not_before(rules: Path) -> None:
    tests = [
        firing(alert, HEALTHY | case.series, {case.quiet_at: 0, case.fires_at: 1}, case.severity)
        for alert, case in TROUBLE.items()
    ]
    run(rules, *tests)


@needs_promtool
def test_none_fires_on_a_healthy_server(rules: Path) -> None:
    run(rules, *(firing(alert, HEALTHY, {"10m": 0, "45m": 0, "100m": 0}) for alert in TROUBLE))


@needs_promtool
def test_a_collapse_without_traffic_is_none(rules: Path) -> None:
    idle = {name: ("7x120" if "_total" in name else value) for name, value in HEALTHY.items()}
    run(rules, firing("SglGraftAcceptLengthCollapsed", idle, {"60m": 0}))


@needs_promtool
def test_the_tester_can_fail(rules: Path) -> None:
    with pytest.raises(AssertionError, match="FAILED"):
        run(rules, firing("SglGraftKvCacheFull", HEALTHY, {"20m": 1}))
