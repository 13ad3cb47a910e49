"""Every set of values that should work: lints, renders, fits Kubernetes' schemas, and is what it was."""

from pathlib import Path

import kubernetes_validate
import pytest

from .cases import CPU, GOOD, GPU, HPA, KEDA, NODES, STATE, TWO
from .chart import KUBERNETES, engine_pod, golden_text, lint, merged, only, render, validate, vendored_schema

GOLDEN = Path(__file__).parent / "golden"


def test_enough_sets_and_every_stored_render_has_one() -> None:
    assert len(GOOD) >= 40
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == set(GOOD)


@pytest.mark.parametrize("name", GOOD)
def test_lints_renders_and_fits(name: str) -> None:
    assert lint(GOOD[name]) == []
    objects = render(GOOD[name])
    for item in objects:
        for version in KUBERNETES:
            validate(item, version)
    stored = (GOLDEN / f"{name}.yaml").read_text()
    assert golden_text(objects) == stored, "if this is meant: python -m tests.deploy.write_golden"


def test_names_are_unique_and_short() -> None:
    for values in GOOD.values():
        named = [(item["kind"], item["metadata"]["name"]) for item in render(values)]
        assert len(named) == len(set(named))
        assert all(len(name) <= 52 for _, name in named)  # a StatefulSet adds its number and a revision


def test_a_field_that_does_not_exist_fails() -> None:
    item = only(render(GPU), "Deployment")
    item["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["timeout"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(item, KUBERNETES[0])


def test_a_custom_resource_without_a_schema_fails() -> None:
    with pytest.raises(FileNotFoundError):
        validate({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "x"}}, KUBERNETES[0])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (GOOD["watched"], "ServiceMonitor"),
        (GOOD["watched"], "PrometheusRule"),
        (GOOD["keda"], "ScaledObject"),
        (GOOD["httproute"], "HTTPRoute"),
        (GOOD["multi-node"], "LeaderWorkerSet"),
    ],
)
def test_custom_resource_schemas_are_strict(values: dict, kind: str) -> None:
    item = only(render(values), kind)
    validator = vendored_schema(kind, item["apiVersion"])
    assert not list(validator.iter_errors(item))
    for wrong in (item["spec"] | {"foo": 1}, {}):
        assert list(validator.iter_errors(item | {"spec": wrong}))


@pytest.mark.parametrize(
    ("values", "kind"),
    [(GPU, "Deployment"), (merged(GPU, STATE), "StatefulSet"), (merged(GPU, NODES), "LeaderWorkerSet")],
)
def test_workload_of_each_need(values: dict, kind: str) -> None:
    assert only(render(values), kind)["spec"]["replicas"] == 1


@pytest.mark.parametrize("scaler", [HPA, KEDA])
def test_an_autoscaler_owns_the_replicas(scaler: dict) -> None:
    objects = render(merged(GPU, scaler))
    assert "replicas" not in only(objects, "Deployment")["spec"]
    kinds = [item["kind"] for item in objects]
    assert ("HorizontalPodAutoscaler" in kinds) != ("ScaledObject" in kinds)


def test_selectors_do_not_depend_on_values_that_change() -> None:
    changed = merged(GPU, {"podLabels": {"a": "b"}, "image": {"tag": "0.2.0"}, "model": {"servedName": "x"}})
    before, after = (only(render(values), "Deployment")["spec"]["selector"] for values in (GPU, changed))
    assert before == after


def test_a_changed_setting_restarts_the_pods() -> None:
    def annotations(width: int) -> dict:
        values = merged(GPU, {"speculative": {"graft": {"table": {"row_width": width}}}})
        found: dict = only(render(values), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return found

    assert annotations(4) == annotations(4) != annotations(8)


def test_probes_ask_the_right_paths_with_enough_time() -> None:
    (engine,) = engine_pod(render(GPU))["containers"]
    assert (
        engine["startupProbe"]["httpGet"]["path"] == engine["livenessProbe"]["httpGet"]["path"] == "/health"
    )
    assert engine["readinessProbe"]["httpGet"]["path"] == "/ready"
    waits = int({item["name"]: item.get("value") for item in engine["env"]}["SGLANG_HEALTH_CHECK_TIMEOUT"])
    assert min(engine[probe]["timeoutSeconds"] for probe in ("startupProbe", "livenessProbe")) > waits
    assert engine["startupProbe"]["failureThreshold"] * engine["startupProbe"]["periodSeconds"] >= 1800


def test_secrets_are_only_referred_to() -> None:
    (engine,) = engine_pod(render(GOOD["keys"]))["containers"]
    assert "$(SGL_GRAFT_API_KEY)" in engine["args"] and "$(SGL_GRAFT_ADMIN_API_KEY)" in engine["args"]
    named = {item["name"]: item for item in engine["env"]}
    for variable in ("SGL_GRAFT_API_KEY", "SGL_GRAFT_ADMIN_API_KEY"):
        assert set(named[variable]) == {"name", "valueFrom"}
    assert not any(item["kind"] == "Secret" for values in GOOD.values() for item in render(values))


def test_the_router_looks_for_the_pods_that_serve() -> None:
    for values in (merged(GPU, TWO), merged(GPU, NODES)):
        objects = render(merged(values, {"router": {"enabled": True}}))
        router = only(objects, "Deployment", "demo-sgl-graft-router")["spec"]["template"]["spec"][
            "containers"
        ][0]
        words = router["args"]
        start = words.index("--selector") + 1
        end = next(place for place in range(start, len(words)) if words[place].startswith("--"))
        asked = dict(word.split("=", 1) for word in words[start:end])
        assert asked == only(objects, "Service", "demo-sgl-graft")["spec"]["selector"]


def test_cpu_mode_asks_for_no_gpu() -> None:
    for item in render(CPU):
        assert "nvidia" not in str(item)
