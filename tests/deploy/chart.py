"""The chart as the tests see it: rendered by Helm's SDK, checked against Kubernetes' schemas."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "sgl-graft"
SCHEMAS = Path(__file__).parent / "schemas"
RELEASE, NAMESPACE = "demo", "llm"
KUBERNETES = ("1.30", "1.37")  # the chart's oldest, and the newest that kubernetes-validate knows
# Read anew for every object otherwise, several megabytes each time.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)

Values = dict[str, Any]
Object = dict[str, Any]


def merged(base: Values, *overlays: Values) -> Values:
    """A copy of `base` with the overlays laid over it, mapping by mapping."""
    result = copy.deepcopy(base)
    for overlay in overlays:
        for key, value in overlay.items():
            old = result.get(key)
            result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render_files(values: Values) -> dict[str, str]:
    """Text of every template, by its path."""
    files: dict[str, str] = chart().render(values, name=RELEASE, namespace=NAMESPACE)
    return files


def render(values: Values) -> list[Object]:
    """The objects of a release, in the order of their templates."""
    found = []
    for path, text in sorted(render_files(values).items()):
        if path.endswith(".yaml"):
            found += [document for document in yaml.safe_load_all(text) if document]
    return found


def lint(values: Values) -> list[str]:
    """What `helm lint --strict` would complain about."""
    report = helm_python.lint(CHART, values, strict=True, namespace=NAMESPACE)
    notes = [f"{item['path']}: {item['error']}" for item in report["messages"] if item["severity"] >= 2]
    return notes + list(report["errors"])


def refusal(values: Values) -> str:
    """The message that a set of values is refused with."""
    try:
        render_files(values)
    except helm_python.HelmError as error:
        return str(error)
    raise AssertionError("the chart rendered")


def only(objects: list[Object], kind: str, name: str | None = None) -> Object:
    (found,) = [item for item in objects if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    return found


def pod_templates(item: Object) -> list[Object]:
    """Pod templates inside an object, whatever its kind."""
    spec = item.get("spec", {})
    inner = spec.get("leaderWorkerTemplate", spec)
    return [inner[key] for key in ("template", "leaderTemplate", "workerTemplate") if key in inner]


def engine_pod(objects: list[Object]) -> Object:
    """Spec of the pod that answers requests."""
    (workload,) = [
        item
        for item in objects
        if item["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet")
        and not item["metadata"]["name"].endswith("-router")
    ]
    spec: Object = pod_templates(workload)[0]["spec"]
    return spec


@functools.cache
def vendored_schema(kind: str, api_version: str) -> jsonschema.protocols.Validator:
    """Our schema of a custom resource.

    Raises:
        FileNotFoundError: there is none, which is a failure and not a warning.
    """
    group, version = api_version.split("/")
    text = (SCHEMAS / f"{kind.lower()}-{group.split('.')[0]}-{version}.json").read_text()
    validator: jsonschema.protocols.Validator = jsonschema.Draft202012Validator(json.loads(text))
    return validator


@functools.cache
def _validate(text: str, version: str) -> None:
    item = json.loads(text)
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        vendored_schema(item["kind"], item["apiVersion"]).validate(item)
        for template in pod_templates(item):
            pod = {"apiVersion": "v1", "kind": "Pod"} | template
            kubernetes_validate.validate(pod, version, strict=True)


def validate(item: Object, version: str) -> None:
    """Check one object; unknown fields and unknown kinds fail. Equal objects are checked once."""
    _validate(json.dumps(item, sort_keys=True), version)


def golden_text(objects: list[Object]) -> str:
    """What is compared with the stored render: everything, with long files replaced by their digest."""

    def short(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: short(value) for key, value in node.items()}
        if isinstance(node, list):
            return [short(value) for value in node]
        if isinstance(node, str) and len(node) > 1000:
            return "sha256:" + hashlib.sha256(node.encode()).hexdigest()
        return node

    return yaml.safe_dump_all([short(item) for item in objects], sort_keys=False, width=110)
