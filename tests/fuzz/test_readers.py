"""Damaged configuration, state and request fields: taken or refused with a reason, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .cases import case, readers, run

FOUND = Path(__file__).with_name("found.json")  # reader -> seeds of cases that once failed
EACH = 300
SOAK_EACH = 8000
NAMES = (
    "config file", "inline config", "table", "calibration", "block costs", "load costs", "policy", "replay",
    "request settings",
)  # fmt: skip


def failures(folder: Path, name: str, seeds: range | list[int]) -> dict[int, str]:
    reader = readers(folder)[name]
    found = {seed: run(reader, folder, seed) for seed in seeds}
    return {seed: wrong for seed, wrong in found.items() if wrong is not None}


@pytest.mark.parametrize("name", NAMES)
def test_damaged_input_is_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    assert not failures(tmp_path, name, range(EACH))


@pytest.mark.parametrize("name", NAMES)
def test_what_once_failed_is_mended(tmp_path: Path, name: str) -> None:
    assert not failures(tmp_path, name, json.loads(FOUND.read_text()).get(name, []))


def test_every_reader_is_run_and_its_good_document_is_taken(tmp_path: Path) -> None:
    everything = readers(tmp_path)
    assert tuple(everything) == NAMES
    for reader in everything.values():
        good = reader.good if isinstance(reader.good, bytes) else json.dumps(reader.good).encode()
        reader.read(tmp_path, good)


def test_cases_damage_and_repeat(tmp_path: Path) -> None:
    reader = readers(tmp_path)["config file"]
    cases = {case(reader, seed) for seed in range(200)}
    assert len(cases) > 150
    assert case(reader, 7) == case(reader, 7)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_many_more(tmp_path: Path, name: str) -> None:
    assert not failures(tmp_path, name, range(10_000, 10_000 + SOAK_EACH))
