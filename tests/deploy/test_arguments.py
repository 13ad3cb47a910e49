"""What the chart passes to the server is what SGLang's own parser, with our plugin loaded, understands."""

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang_router.router_args import RouterArgs

from sgl_graft.config import parse_config
from tests.test_refusals import DFLASH, DRAFT, SPECBLOCK, TARGET, write_model

from .cases import CPU, GOOD
from .chart import CHART, NAMESPACE, Object, Values, chart, engine_pod, merged, only, render

VARIABLE = re.compile(r"\$\(([A-Z_]+)\)")
# What LeaderWorkerSet's operator and the cluster's secrets would put into the environment.
INJECTED = {
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "demo-sgl-graft-0.demo-sgl-graft.llm",
    "SGL_GRAFT_API_KEY": "key-from-a-secret",
    "SGL_GRAFT_ADMIN_API_KEY": "admin-key-from-a-secret",
}
FIELDS = [
    "model_path",
    "revision",
    "served_model_name",
    "context_length",
    "device",
    "host",
    "port",
    "tp_size",
    "max_running_requests",
    "mem_fraction_static",
    "max_total_tokens",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "enable_metrics",
    "api_key",
    "admin_api_key",
    "nnodes",
    "node_rank",
    "dist_init_addr",
]


def words_of(container: Object) -> list[str]:
    """The arguments as the kubelet passes them, variables replaced."""
    words = [VARIABLE.sub(lambda match: INJECTED[match[1]], word) for word in container["args"]]
    assert not any("$(" in word for word in words)
    return words


def with_local_files(words: list[str], objects: list[Object], folder: Path) -> list[str]:
    """The same arguments with the config file where this machine has it."""
    if "--graft-config" not in words:
        return words
    place = words.index("--graft-config") + 1
    mounts = engine_pod(objects)["containers"][0]["volumeMounts"]
    (mount,) = [item["mountPath"] for item in mounts if item["name"] == "config"]
    config = only(objects, "ConfigMap", "demo-sgl-graft")["data"]
    name = words[place].removeprefix(mount + "/")
    (folder / name).write_text(config[name])
    return [*words[:place], str(folder / name), *words[place + 1 :]]


class Parser:
    """One process that has imported SGLang, and forks for every case."""

    def __init__(self) -> None:
        ours = ("SGLGRAFT_ALGORITHM", "SGLGRAFT_CONFIG", "SGLGRAFT_DISABLE")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        self.process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).parents[1] / "resolve_arguments.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"SGLANG_PLATFORM": "sgl_graft_cpu", "HF_HUB_OFFLINE": "1"},
        )

    def ask(self, case: dict[str, Any]) -> Any:
        assert self.process.stdin and self.process.stdout
        print(json.dumps(case), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def parser() -> Iterator[Parser]:
    parser = Parser()
    yield parser
    assert parser.process.stdin
    parser.process.stdin.close()
    parser.process.wait(30)


def expected(values: Values) -> dict[str, Any]:
    """What the server should be told, by the names of SGLang's arguments."""
    whole = chart().merge_values(values)
    wants: dict[str, Any] = {
        "model_path": whole["model"]["path"],
        "revision": whole["model"]["revision"] or None,
        "served_model_name": whole["model"]["servedName"] or None,
        "context_length": whole["model"].get("contextLength"),
        "device": whole["device"],
        "host": "0.0.0.0",
        "port": 30000,
        "tp_size": whole["tensorParallelSize"],
        "max_running_requests": whole.get("maxRunningRequests"),
        "mem_fraction_static": whole.get("memFractionStatic"),
        "max_total_tokens": whole.get("maxTotalTokens") or (32768 if whole["device"] == "cpu" else None),
        "enable_metrics": whole["metrics"]["enabled"],
        "api_key": INJECTED["SGL_GRAFT_API_KEY"] if whole["apiKey"]["existingSecret"]["name"] else None,
        "admin_api_key": None,
        "nnodes": 1,
        "node_rank": 0,
        "dist_init_addr": None,
    }
    if whole["adminApiKey"]["existingSecret"]["name"]:
        wants["admin_api_key"] = INJECTED["SGL_GRAFT_ADMIN_API_KEY"]
    if whole["multiNode"]["enabled"]:
        wants |= {
            "nnodes": whole["multiNode"]["nodes"],
            "node_rank": 1,
            "dist_init_addr": INJECTED["LWS_LEADER_ADDRESS"] + ":5000",
        }
    speculative = whole["speculative"]
    if speculative["algorithm"] == "none":
        wants |= dict.fromkeys(FIELDS[11:17])
    else:
        tree = (5, 4, 16) if speculative["algorithm"] in ("GRAFT", "EAGLE3") else (None, None, None)
        wants |= {
            "speculative_algorithm": speculative["algorithm"],
            "speculative_draft_model_path": whole["draft"]["path"],
            "speculative_draft_model_revision": whole["draft"]["revision"] or None,
            "speculative_num_steps": speculative.get("steps") or tree[0],
            "speculative_eagle_topk": speculative.get("topk") or tree[1],
            "speculative_num_draft_tokens": speculative.get("slots") or tree[2],
        }
    return wants


@pytest.fixture(scope="module")
def parsed(parser: Parser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """SGLang's answer to every render's arguments, and to one with a flag that does not exist."""
    words = {}
    for name, values in GOOD.items():
        objects = render(values)
        (engine,) = engine_pod(objects)["containers"]
        words[name] = with_local_files(words_of(engine), objects, tmp_path_factory.mktemp(name))
    words["wrong"] = [*words["none"], "--no-such-flag"]
    answers = parser.ask({"argvs": list(words.values()), "fields": FIELDS})
    return dict(zip(words, answers, strict=True))


@pytest.mark.parametrize("name", GOOD)
def test_sglangs_parser_understands_the_container(parsed: dict[str, dict[str, Any]], name: str) -> None:
    assert parsed[name]["code"] is None, parsed[name]["stderr"]
    assert parsed[name]["parsed"] == expected(GOOD[name])


def test_a_flag_that_does_not_exist_fails(parsed: dict[str, dict[str, Any]]) -> None:
    assert parsed["wrong"]["code"] == 2 and "--no-such-flag" in parsed["wrong"]["stderr"]


def advertised() -> list[str]:
    """The algorithms that the chart says this release has."""
    text = (CHART / "templates" / "_helpers.tpl").read_text()
    table = re.search(r'define "sgl-graft.algorithms" -}}\n(.*?)\n{{- end }}', text, re.DOTALL)
    assert table
    return list(yaml.safe_load(table[1]))


@pytest.mark.parametrize("algorithm", advertised())
def test_every_advertised_algorithm_resolves(parser: Parser, algorithm: str, tmp_path: Path) -> None:
    """Past the parser: defaults filled in, draft compared with target, up to loading the model."""
    config = {"BLOCKPILOT": DFLASH, "SPECBLOCK": SPECBLOCK}.get(algorithm, DRAFT)
    target, draft = write_model(tmp_path / "t", TARGET), write_model(tmp_path / "d", config)
    values = merged(CPU, {"model": {"path": str(target)}, "speculative": {"algorithm": algorithm}})
    values["draft"]["path"] = "" if algorithm == "none" else str(draft)
    objects = render(values)
    words = words_of(engine_pod(objects)["containers"][0])
    answer = parser.ask({"argv": with_local_files(words, objects, tmp_path)})
    assert answer["code"] is None, answer
    engines_own = {"GRAFT": "EAGLE3", "BLOCKPILOT": "DFLASH", "SPECBLOCK": "SPECBLOCK"}
    assert answer["graft"] == (algorithm if algorithm in engines_own else None)
    assert (answer["algorithm"] or "none") == engines_own.get(algorithm, algorithm)


def test_the_settings_files_are_valid_configurations() -> None:
    found = {}
    for name, values in GOOD.items():
        for item in render(values):
            if item["kind"] == "ConfigMap" and "graft.yaml" in item["data"]:
                found[name] = parse_config(yaml.safe_load(item["data"]["graft.yaml"]), name)
    assert len(found) >= 8
    assert found["specblock-settings"].specblock.blocks == 3
    assert all(config != parse_config({}, "") for config in found.values())
    assert found["state"].graft.table.save_path == Path("/var/lib/sgl-graft/successors.table")
    assert found["graft-calibration"].graft.calibration == Path(
        "/etc/sgl-graft/calibration/graft_calibration.json"
    )


@pytest.mark.parametrize("name", [name for name in GOOD if "router" in name])
def test_the_routers_parser_understands_the_router(name: str) -> None:
    pod = only(render(GOOD[name]), "Deployment", "demo-sgl-graft-router")["spec"]["template"]["spec"]
    parser = ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    args = RouterArgs.from_cli_args(
        parser.parse_args(words_of(pod["containers"][0])), use_router_prefix=False
    )
    assert args.service_discovery and args.service_discovery_namespace == NAMESPACE
    assert (args.host, args.port, args.service_discovery_port) == ("0.0.0.0", 30000, 30000)
    assert args.health_check_endpoint == "/ready" and args.policy == "cache_aware"
    assert args.selector["app.kubernetes.io/component"] == "engine"
    assert args.shutdown_grace_period_secs < pod["terminationGracePeriodSeconds"]
