"""Files that a server writes while it serves: whole or not at all, and never a reason to stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_graft.files import check_writable, write_or_warn, write_whole


def test_a_failed_write_leaves_the_former_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    write_whole(path, "former")
    (tmp_path / "gone").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "gone" / "missing" / "file", "new")
    write_or_warn(tmp_path / "missing" / "file", "new", "graft.collect")
    assert "graft.collect" in caplog.text and "serving goes on" in caplog.text
    assert path.read_text() == "former" and sorted(each.name for each in tmp_path.iterdir()) == [
        "file",
        "gone",
    ]


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    check_writable(tmp_path / "file", "graft.collect")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"graft.collect .*missing/file cannot be written"):
        check_writable(tmp_path / "missing" / "file", "graft.collect")
