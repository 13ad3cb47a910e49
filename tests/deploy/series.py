"""The series that exist, read where they are made: SGLang's source, ours, and Prometheus' own."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import promql_parser

# Which labels SGLang's collectors put on everything of theirs (metrics_collector.py: `init_new` and
# `tokenizer_metric_labels`).
ENGINE_LABELS = {
    "SchedulerMetricsCollector": {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"},
    "TokenizerMetricsCollector": {"model_name", "engine_type"},
    "_HttpRequestMetrics": set(),
}
# What a ServiceMonitor adds to every series it scrapes.
TARGET_LABELS = {"namespace", "service", "pod", "container", "endpoint", "instance", "job"}
SUFFIXES = {"Counter": ("",), "Gauge": ("",), "Histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True)
class Selector:
    """A series as a query asks for it: its name, and the labels it matches on."""

    name: str
    labels: frozenset[str]


def _sglang_file(relative: str) -> Path:
    # Not imported: SGLang takes seconds, and its metrics modules are only data here.
    spec = find_spec("sglang")
    assert spec and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / relative


def _constants(node: ast.AST | None) -> set[str]:
    if node is None:
        return set()
    return {
        item.value
        for item in ast.walk(node)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }


def _declared(tree: ast.Module, collectors: dict[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in collectors):
        for call in (node for node in ast.walk(owner) if isinstance(node, ast.Call)):
            kind = call.func.id if isinstance(call.func, ast.Name) else ""
            keywords = {item.arg: item.value for item in call.keywords}
            name = keywords.get("name")
            if kind in SUFFIXES and isinstance(name, ast.Constant):
                labels = collectors[owner.name] | _constants(keywords.get("labelnames")) | TARGET_LABELS
                for suffix in SUFFIXES[kind]:
                    found[name.value + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


@functools.cache
def existing() -> dict[str, set[str]]:
    """Labels of every series that a server and Prometheus can have, by its name."""
    from sgl_graft.serving.metrics import PREFIX

    found: dict[str, set[str]] = {"up": set(TARGET_LABELS)}
    for file in ("metrics_collector.py", "http_request_metrics.py"):
        source = _sglang_file(f"srt/observability/{file}").read_text()
        found |= _declared(ast.parse(source), ENGINE_LABELS)
    scheduler = ENGINE_LABELS["SchedulerMetricsCollector"] | TARGET_LABELS
    for suffix, ours in zip(("_total", ""), of_ours(), strict=True):
        for name, own in ours.items():
            found[PREFIX + name + suffix] = scheduler | ({own} if own else set())
    return found


def of_ours() -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Our counters and gauges, and the label that each has beside SGLang's."""
    from sgl_graft.serving import adaptation_metrics, metrics, verify_metrics

    counters = metrics.COUNTERS | verify_metrics.SHARED | verify_metrics.COUNTERS
    counters |= adaptation_metrics.COUNTERS
    gauges = {name: own for name, (_, own) in metrics.GAUGES.items()} | {"draft_version": None}
    return {name: own for name, (_, own) in counters.items()}, gauges


def selectors(query: str) -> list[Selector]:
    """Every series that a query reads.

    Raises:
        ValueError: it is not PromQL.
    """
    found: list[Selector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            labels = frozenset(item.name for item in node.matchers.matchers)
            found.append(Selector(node.name or "", labels))

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def grouping(query: str) -> set[str]:
    """Labels that a query groups by."""
    found: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def problems(query: str) -> list[str]:
    """What a query reads that does not exist."""
    wrong, labels = [], set()
    for selector in selectors(query):
        if selector.name not in existing():
            wrong.append(f"no series {selector.name}")
            continue
        labels |= existing()[selector.name]
        wrong += [
            f"{selector.name} has no label {label}" for label in selector.labels - existing()[selector.name]
        ]
    return wrong + [f"no series of it has the label {label}" for label in grouping(query) - labels]
