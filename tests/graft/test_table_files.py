"""Tables by name: where a name may lead, what saving and loading do, and that private ones stay put."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_graft.config import GraftConfig, TableConfig
from sgl_graft.graft.calibration import Calibration
from sgl_graft.graft.keeper import TableKeeper
from sgl_graft.graft.shape import GraftShape
from sgl_graft.graft.state import GraftState
from sgl_graft.graft.store import TableIdentity
from sgl_graft.graft.table_files import TableFiles, file_in

SHAPE = GraftShape(slots=4, topk=2, steps=2, num_rows=3, vocab_size=10)
IDENTITY = TableIdentity("target", "tokenizer")


def files(folder: Path | None, scope: str = "shared", identity: TableIdentity = IDENTITY) -> TableFiles:
    table = TableConfig(scope=scope, folder=folder if scope == "shared" else None, context_rows=16)
    state = GraftState(GraftConfig(table=table), SHAPE, Calibration())
    keeper = TableKeeper(state.table, table, identity, saves=True)
    return TableFiles(state, keeper, lambda decide: decide())


def wait(mine: TableFiles) -> int:
    while (written := mine.saved()) is None:
        time.sleep(0.01)
    return written


@given(st.text(min_size=1, max_size=120))
def test_a_name_never_leads_out_of_the_folder(name: str) -> None:
    folder = Path("/nowhere/tables")
    try:
        path = file_in(folder, name)
    except ValueError:
        return
    assert path.parent == folder and path.name == name and not name.startswith(".")


@pytest.mark.parametrize("name", ["../a", "/a", "a/b", "..", ".a", "a b", "a\n", "é", "x" * 101])
def test_names_that_are_paths_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="never a path"):
        file_in(tmp_path, name)


def test_without_a_folder_there_is_nothing_to_name() -> None:
    with pytest.raises(ValueError, match=r"graft\.table\.folder"):
        file_in(None, "a")


def test_links_are_neither_read_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        file_in(tmp_path, "link")


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    first, second = files(tmp_path), files(tmp_path)
    first._state.table.tokens.fill_(3)
    first._keeper.began = 1234.0
    first.save("a")
    assert wait(first) == (tmp_path / "a").stat().st_size
    second.load("a")
    assert (second._state.table.tokens == 3).all() and second._keeper.began == 1234.0
    second.clear()
    assert (second._state.table.tokens == -1).all() and (tmp_path / "a").is_file()


def test_a_file_of_another_target_changes_nothing_and_names_no_path(tmp_path: Path) -> None:
    other, mine = files(tmp_path, identity=TableIdentity("other", "tokenizer")), files(tmp_path)
    other.save("a")
    wait(other)
    mine._state.table.tokens.fill_(5)
    with pytest.raises(ValueError, match="has target 'other'") as refusal:
        mine.load("a")
    assert str(tmp_path) not in str(refusal.value)
    assert (mine._state.table.tokens == 5).all()


def test_a_failed_save_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mine = files(tmp_path / "file" / "below")
    mine.save("a")
    with pytest.raises(ValueError, match="could not be saved"):
        wait(mine)


@pytest.mark.parametrize("scope", ["group", "request"])
def test_private_tables_stay_in_memory(scope: str, tmp_path: Path) -> None:
    mine = files(tmp_path, scope)
    for action in (mine.save, mine.load):
        with pytest.raises(ValueError, match="private and never stored"):
            action("a")
    mine.clear()


def test_rank_0_reads_and_the_others_take_what_it_read(tmp_path: Path) -> None:
    first = files(tmp_path)
    first._state.table.tokens.fill_(7)
    first.save("a")
    wait(first)
    read = []
    reader, other = files(tmp_path), files(Path("/nowhere"))
    reader._agree = lambda decide: read.append(decide()) or read[0]
    other._agree = lambda decide: read[0]  # what comes over the network
    reader.load("a")
    other.load("a")
    assert (other._state.table.tokens == 7).all()
