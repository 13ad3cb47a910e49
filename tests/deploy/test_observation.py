"""Dashboard, alert rules and autoscalers read only series that exist, with labels that these have."""

import json
import re

import pytest

from sgl_graft.serving.metrics import PREFIX

from .cases import GOOD, GPU, PLAIN, WATCHED, speculative
from .chart import CHART, merged, only, render
from .series import existing, of_ours, problems, selectors

BOARD = json.loads((CHART / "dashboards" / "sgl-graft.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def filled(query: str) -> str:
    """A panel's query as Grafana sends it."""
    for name, value in (("$__rate_interval", "1m"), ("$namespace", "llm"), ("$service", "demo-sgl-graft")):
        query = query.replace(name, value)
    assert "$" not in query
    return query


def panel_queries() -> list[tuple[str, str]]:
    return [(panel["title"], filled(target["expr"])) for panel in PANELS for target in panel["targets"]]


def rules(values: dict) -> list[dict]:
    (group,) = only(render(values), "PrometheusRule")["spec"]["groups"]
    found: list[dict] = group["rules"]
    return found


@pytest.mark.parametrize(("title", "query"), panel_queries())
def test_panels_read_what_exists(title: str, query: str) -> None:
    assert problems(query) == [], title
    assert all({"namespace", "service"} <= selector.labels for selector in selectors(query)), title


@pytest.mark.parametrize("rule", rules(GOOD["watched"]), ids=lambda rule: rule["alert"])
def test_alerts_read_what_exists(rule: dict) -> None:
    assert problems(rule["expr"]) == []
    named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    for label in named:
        assert label in rule["expr"] or rule["expr"].startswith("up{"), (
            f"{label} is not in the alert's result"
        )


@pytest.mark.parametrize("name", ["keda", "keda-usage", "multi-node-keda"])
def test_keda_reads_what_exists_once_per_pod(name: str) -> None:
    for trigger in only(render(GOOD[name]), "ScaledObject")["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        assert problems(query) == []
        # Every rank repeats the gauges: without these two, tensor parallelism would multiply the queue.
        assert "tp_rank" in selectors(query)[0].labels and "max by (pod)" in query


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("sglang:num_que_reqs", "no series sglang:num_que_reqs"),
        ('rate(sglang:generation_tokens_total{tp_rank="0"}[1m])', "has no label tp_rank"),
        ("sum by (source) (sglang:token_usage)", "has the label source"),
        ("rate(sglang:queue_time_seconds[1m])", "no series sglang:queue_time_seconds"),
    ],
)
def test_what_does_not_exist_is_found(query: str, expected: str) -> None:
    assert any(expected in problem for problem in problems(query))


def test_the_list_of_series_is_not_made_up() -> None:
    assert len(existing()) > 150
    assert "sglang:queue_time_seconds_bucket" in existing() and PREFIX + "rounds_total" in existing()


def test_every_metric_of_ours_that_counts_work_is_on_the_dashboard() -> None:
    shown = " ".join(query for _, query in panel_queries())
    alerted = " ".join(rule["expr"] for rule in rules(GOOD["watched"]))
    counters, gauges = of_ours()
    for name in counters.keys() | gauges.keys():
        if name not in (
            "rank_checks",
            "groups_turned_away",
            "committed_tokens",
        ):  # off by default; see accept length
            assert PREFIX + name in shown + alerted, name


def test_panels_have_titles_and_explain_themselves() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]}
    assert len(places) == len(ids), "two panels at one place"
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in BOARD["panels"])


def test_the_rendered_dashboard_is_the_file() -> None:
    data = only(render(GOOD["watched"]), "ConfigMap", "demo-sgl-graft-dashboard")["data"]
    assert json.loads(data["sgl-graft.json"]) == BOARD


def test_alerts_fit_the_algorithm() -> None:
    names = {
        algorithm: {rule["alert"] for rule in rules(merged(base, WATCHED, speculative(algorithm)))}
        for algorithm, base in (("none", PLAIN), ("EAGLE3", GPU), ("GRAFT", GPU), ("SPECBLOCK", GPU))
    }
    assert names["EAGLE3"] - names["none"] == {"SglGraftAcceptLengthCollapsed"}
    assert names["GRAFT"] - names["EAGLE3"] == {"SglGraftTableSetAside", "SglGraftTableSaveFailing"}
    assert names["SPECBLOCK"] - names["EAGLE3"] == {"SglGraftAdaptationSetbacks"}


def test_thresholds_are_values() -> None:
    values = merged(GPU, WATCHED, {"metrics": {"rules": {"acceptLength": 1.5, "queueSeconds": 3}}})
    text = str(rules(values))
    assert "< 1.5" in text and "> 3" in text
