"""Tables kept on disk by a serving rank."""

import pytest
import torch
from sgl_graft.cuda_graph.successor_table import SuccessorTable

from sgl_graft.config import TableConfig
from sgl_graft.graft.keeper import TableKeeper
from sgl_graft.graft.store import TableIdentity, save_table

MINE = TableIdentity("t", "k")


def table():
    return SuccessorTable.create(10, k=2)


def test_saved_state_comes_back_after_a_restart(tmp_path):
    config = TableConfig(save_path=tmp_path / "table", save_every_s=1e-6)
    first = table()
    keeper = TableKeeper(first, config, MINE, saves=True)
    first.tokens[3, 0] = 7
    keeper.save_when_due()
    keeper.wait()
    again = table()
    TableKeeper(again, config, MINE, saves=True)
    assert torch.equal(first.tokens, again.tokens)


def test_only_the_saving_rank_writes_and_not_before_it_is_due(tmp_path):
    path = tmp_path / "table"
    for saves, interval in ((False, 1e-6), (True, 1e6)):
        keeper = TableKeeper(table(), TableConfig(save_path=path, save_every_s=interval), MINE, saves=saves)
        keeper.save_when_due()
        keeper.wait()
        assert not path.exists()


def test_a_named_file_must_fit_while_the_servers_own_is_set_aside(tmp_path):
    path = tmp_path / "table"
    save_table(table(), path, TableIdentity("other", "k"))
    with pytest.raises(ValueError, match="target"):
        TableKeeper(table(), TableConfig(path=path), MINE, saves=True)
    TableKeeper(table(), TableConfig(save_path=path), MINE, saves=True)
    assert path.with_suffix(".damaged").exists() and not path.exists()


def test_a_full_disk_does_not_stop_the_server(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    config = TableConfig(save_path=blocked / "table", save_every_s=1e-6)
    keeper = TableKeeper(table(), config, MINE, saves=True)
    keeper.save_when_due()
    keeper.wait()
    assert "could not save" in caplog.text
