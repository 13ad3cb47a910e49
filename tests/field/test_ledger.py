"""Every report from the field is decided: by tests that exist, or by refusals that are really raised."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.test_refusals import DFLASH, DRAFT, SPECBLOCK, Resolver, refused, write_model

ROOT = Path(__file__).parents[2]
NUM_REPORTS = 82
KINDS = ("tested", "refused", "upstream's", "not applicable")
KEYS = {"number", "thread", "kind", "why", "tests", "refusals", "open"}
REPORTS: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "ledger.toml").read_text())["report"]
REFUSALS = [(row["number"], refusal) for row in REPORTS for refusal in row.get("refusals", ())]
TREE = {
    "--speculative-num-steps": "3",
    "--speculative-eagle-topk": "2",
    "--speculative-num-draft-tokens": "8",
}


def test_every_report_is_decided_once() -> None:
    assert [row["number"] for row in REPORTS] == list(range(1, NUM_REPORTS + 1))
    for row in REPORTS:
        assert set(row) <= KEYS and row["kind"] in KINDS and row["thread"], row
        assert len(row["why"]) > 6 and row.get("open", "x"), row
        assert row["kind"] != "tested" or row["tests"], row
        assert (row["kind"] != "refused") or row["refusals"], row


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the tests that pytest collects from a file: ``test_x`` and ``TestX::test_x``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found.add(node.name)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found |= {
                f"{node.name}::{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
            }
    return frozenset(found)


@pytest.mark.parametrize("row", REPORTS, ids=lambda row: str(row["number"]))
def test_its_tests_exist(row: dict[str, Any]) -> None:
    for name in row.get("tests", ()):
        file, _, test = name.partition("::")
        path = ROOT / file
        assert file.startswith("tests/") and re.fullmatch(r"test_\w+\.py", path.name), name
        assert test in names_in(path), name


def test_a_test_that_does_not_exist_is_noticed() -> None:
    assert "test_every_report_is_decided_once" in names_in(Path(__file__))
    assert "test_of_nothing" not in names_in(Path(__file__))


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resolver]:
    with Resolver(tmp_path_factory.mktemp("models")) as resolver:
        yield resolver


@pytest.mark.parametrize(("number", "refusal"), REFUSALS, ids=lambda value: str(value)[:60])
def test_its_refusals_are_raised(
    resolver: Resolver, tmp_path: Path, number: int, refusal: dict[str, Any]
) -> None:
    argv = list(refusal.get("argv", ()))
    config = ["--graft-config", refusal["config"]] if "config" in refusal else []
    kind = {"GRAFT": DRAFT, "BLOCKPILOT": DFLASH, "SPECBLOCK": SPECBLOCK}[refusal["algorithm"]]
    draft = write_model(tmp_path / "draft", kind | refusal.get("draft", {}))
    flags = ["--speculative-algorithm", refusal["algorithm"], "--speculative-draft-model-path", str(draft)]
    if refusal["algorithm"] == "GRAFT":
        flags += [word for flag, value in TREE.items() if flag not in argv for word in (flag, value)]
    refused(resolver(*flags, *argv, *config), refusal["says"])


@pytest.mark.parametrize("algorithm", ["GRAFT", "BLOCKPILOT", "SPECBLOCK"])
def test_without_what_is_refused_the_same_arguments_pass(
    resolver: Resolver, tmp_path: Path, algorithm: str
) -> None:
    kind = {"GRAFT": DRAFT, "BLOCKPILOT": DFLASH, "SPECBLOCK": SPECBLOCK}[algorithm]
    draft = write_model(tmp_path / "draft", kind)
    flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)]
    tree = [word for item in TREE.items() for word in item] if algorithm == "GRAFT" else []
    answer = resolver(*flags, *tree)
    assert answer["code"] is None, answer
