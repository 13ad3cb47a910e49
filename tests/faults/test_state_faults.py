"""Saved state under kills, full and read-only disks and clocks that jump: what was saved stays readable."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from sgl_graft.cuda_graph.successor_table import SuccessorTable

from sgl_graft.config import TableConfig
from sgl_graft.graft import keeper
from sgl_graft.graft.keeper import SECONDS_PER_DAY, TableKeeper
from sgl_graft.graft.store import TableIdentity, load_table, save_table

MINE = TableIdentity("t", "k")


def save_for_ever(path: Path, told: int) -> None:
    """In a child: save table after table, and say the number of each that was saved."""
    torch.set_num_threads(1)  # threads of the parent do not exist here
    table, number = SuccessorTable.create(20000, k=8), 0
    while True:
        number += 1
        table.tokens.fill_(number)
        table.probs.fill_(number)
        save_table(table, path, MINE)
        os.write(told, number.to_bytes(4, "little"))


def test_a_killed_writer_never_leaves_half_a_table(tmp_path: Path) -> None:
    """Killed at random moments: the file is whole, and no older than the last save that was acknowledged."""
    path = tmp_path / "table"
    table = SuccessorTable.create(20000, k=8)
    for delay in (0.0, 0.004, 0.011, 0.023, 0.05, 0.08):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(path, writer)
            finally:
                os._exit(1)
        os.close(writer)
        assert os.read(reader, 4)  # at least one save is there
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        acknowledged = 1
        while said := os.read(reader, 4):
            acknowledged = int.from_bytes(said, "little")
        os.close(reader)
        load_table(table, path, MINE)
        number = int(table.tokens[0, 0])
        assert bool((table.tokens[: table.empty_row] == number).all())
        assert bool((table.probs[: table.empty_row] == number).all())
        assert number >= acknowledged, "a save that was acknowledged is lost"


@pytest.mark.parametrize("fault", ["full", "read-only", "gone", "a folder in its place"])
def test_a_disk_that_fails_costs_one_save_and_not_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path = tmp_path / "state" / "table"
    mine = SuccessorTable.create(10, k=2)
    mine.tokens[3, 0] = 7
    kept = TableKeeper(mine, TableConfig(save_path=path, save_every_s=1e-9), MINE, saves=True)
    kept.save_when_due()
    kept.wait()
    assert kept.saves == 1

    def broken(*_: object, **__: object) -> int:
        raise OSError({"full": 28, "read-only": 30}.get(fault, 2), fault)

    with monkeypatch.context() as patch:
        if fault in ("full", "read-only"):
            patch.setattr(os, "open" if fault == "read-only" else "fsync", broken)
        elif fault == "gone":
            patch.setattr(Path, "mkdir", broken)
        else:
            patch.setattr(Path, "replace", broken)
        mine.tokens[3, 0] = 8
        kept.save_when_due()
        kept.wait()
    assert kept.failed_saves == 1 and kept.saves == 1
    assert [file.name for file in path.parent.iterdir()] == ["table"], "nothing half-written is left"
    again = SuccessorTable.create(10, k=2)
    load_table(again, path, MINE)
    assert int(again.tokens[3, 0]) == 7
    kept.save_when_due()  # the disk is well again
    kept.wait()
    load_table(again, path, MINE)
    assert int(again.tokens[3, 0]) == 8


class Clock:
    """Both clocks, and a wall clock that can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed, self.set_to = 0.0, 1.7e9
        monkeypatch.setattr(keeper.time, "time", lambda: self.set_to + self.passed)
        monkeypatch.setattr(keeper.time, "monotonic", lambda: 50.0 + self.passed)


@pytest.mark.parametrize("jump_days", [-400.0, -1.0, 0.0, 0.5])
def test_no_trace_outlives_its_time_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_days: float
) -> None:
    """A wall clock set back must not make traces younger; set forward, it may empty the table early."""
    clock = Clock(monkeypatch)
    table = SuccessorTable.create(10, k=2)
    config = TableConfig(retain_days=2.0)
    kept = TableKeeper(table, config, MINE, saves=True)
    table.tokens[3, 0] = 7
    clock.set_to += jump_days * SECONDS_PER_DAY
    clock.passed = 1.4 * SECONDS_PER_DAY
    kept.save_when_due()
    assert int(table.tokens[3, 0]) == 7
    clock.passed = 2.1 * SECONDS_PER_DAY
    kept.save_when_due()
    assert int(table.tokens.max()) == -1


@pytest.mark.parametrize("began", [float("nan"), float("inf"), 4e9, -5.0])
def test_a_file_whose_age_cannot_be_known_counts_as_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: float
) -> None:
    Clock(monkeypatch)
    path, old = tmp_path / "table", SuccessorTable.create(10, k=2)
    old.tokens[3, 0] = 7
    save_table(old, path, MINE, began)
    table = SuccessorTable.create(10, k=2)
    TableKeeper(table, TableConfig(save_path=path, retain_days=2.0), MINE, saves=True)
    assert int(table.tokens.max()) == -1
    TableKeeper(table, TableConfig(path=_saved(tmp_path, old, began)), MINE, saves=True)
    assert torch.equal(table.tokens, old.tokens), "without retain_days no age matters"


def _saved(folder: Path, table: SuccessorTable, began: float) -> Path:
    path = folder / "named"
    save_table(table, path, MINE, began)
    return path
