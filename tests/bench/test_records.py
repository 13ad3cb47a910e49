from dataclasses import replace
from pathlib import Path

import pytest

from sgl_graft.bench.plan import Cell
from sgl_graft.bench.records import CellRecord, Journal, MachineUse, RequestRecord

USE = MachineUse(1.5, 0.1, 0.2, 0.3, 0.4)
REQUEST = RequestRecord(3, (7, 8, 9), ((10.0, 1), (30.5, 2)), 1, "stop", 12, 4)
RECORD = CellRecord(
    Cell("EAGLE3", "qa", 0.7, 8, 1), "digest", "2026-11-30T00:00:00", 2.5, False, (REQUEST,), USE
)


def test_records_survive_the_disk(tmp_path: Path) -> None:
    Journal(tmp_path / "j").add(RECORD)
    again = Journal(tmp_path / "j")
    assert again.get(RECORD.cell, "digest") == RECORD
    assert again.get(RECORD.cell, "other") is None
    assert again.num_stale([(RECORD.cell, "other"), (RECORD.cell._replace(repeat=2), "other")]) == 1


def test_a_line_cut_off_by_a_kill_is_dropped_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.add(RECORD)
    second = replace(RECORD, cell=RECORD.cell._replace(repeat=2))
    whole = path.read_text()
    path.write_text(whole + second.to_json()[:40])
    resumed = Journal(path)
    assert resumed.get(second.cell, "digest") is None
    resumed.add(second)
    assert Journal(path).get(second.cell, "digest") == second
    assert Journal(path).get(RECORD.cell, "digest") == RECORD


def test_damage_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text("{}\n" + RECORD.to_json() + "\n")
    with pytest.raises(ValueError, match="j:1 is damaged; delete the file"):
        Journal(path)
