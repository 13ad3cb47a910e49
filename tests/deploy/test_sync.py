"""What is written twice agrees: README and values, schema and values, schema and configuration."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from sgl_graft.cli.serve import ALGORITHMS

from .chart import CHART
from .test_arguments import advertised

SYNC = CHART.parent / "sync.py"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# Free mappings, whose keys are Kubernetes' or the user's.
OPEN = ("resources", "podSecurityContext", "securityContext")


@pytest.fixture(scope="module")
def sync() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sync", SYNC)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_and_schema_are_what_the_script_makes(sync: ModuleType) -> None:
    for file, made in (("README.md", sync.readme()), ("values.schema.json", sync.schema())):
        assert (CHART / file).read_text() == made, "run: python deploy/helm/sync.py"


def test_every_value_is_described(sync: ModuleType) -> None:
    described = sync.descriptions((CHART / "values.yaml").read_text())

    def leaves(node: Any, path: str) -> list[str]:
        if isinstance(node, dict) and node and path not in described:
            return [
                leaf for key, value in node.items() for leaf in leaves(value, f"{path}.{key}".lstrip("."))
            ]
        return [path]

    assert set(leaves(VALUES, "")) == set(described)


def test_schema_knows_every_value_and_no_other() -> None:
    def compare(values: Any, schema: dict[str, Any], path: str) -> None:
        if path.split(".")[-1] in OPEN or "properties" not in schema or not isinstance(values, dict):
            return
        if path not in ("speculative.graft", "speculative.blockpilot", "speculative.specblock"):
            assert set(schema["properties"]) - {"global"} == set(values), path
        assert schema["additionalProperties"] is False, path
        for key, value in values.items():
            compare(value, schema["properties"][key], f"{path}.{key}".lstrip("."))

    compare(VALUES, SCHEMA, "")


def test_defaults_of_the_algorithms_are_those_of_the_command_line() -> None:
    text = (CHART / "templates" / "_helpers.tpl").read_text()
    table = yaml.safe_load(text.split('define "sgl-graft.algorithms" -}}')[1].split("{{- end }}")[0])
    assert list(table) == advertised()
    for name, row in table.items():
        ours = ALGORITHMS[name]
        assert row["draft"] == ours.needs_draft
        assert (row.get("steps"), row.get("topk"), row.get("slots")) == (ours.steps, ours.topk, ours.slots)


def test_the_default_values_name_no_secret() -> None:
    text = (CHART / "values.yaml").read_text() + Path(CHART / "values-cpu.yaml").read_text()
    for word in ("password", "hf_", "sk-"):
        assert word not in text
