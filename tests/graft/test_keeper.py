"""Tables kept on disk by a serving rank."""

import time
from types import SimpleNamespace

import pytest
import torch
from sgl_graft.cuda_graph.successor_table import SuccessorTable

from sgl_graft.config import TableConfig
from sgl_graft.graft import keeper
from sgl_graft.graft.keeper import TableKeeper
from sgl_graft.graft.store import TableIdentity, save_table

MINE = TableIdentity("t", "k")


def table():
    return SuccessorTable.create(10, k=2)


def test_saved_state_comes_back_after_a_restart(tmp_path):
    config = TableConfig(save_path=tmp_path / "table", save_every_s=1e-6)
    first = table()
    mine = TableKeeper(first, config, MINE, saves=True)
    first.tokens[3, 0] = 7
    mine.save_when_due()
    mine.wait()
    again = table()
    TableKeeper(again, config, MINE, saves=True)
    assert torch.equal(first.tokens, again.tokens)


def test_only_the_saving_rank_writes_and_not_before_it_is_due(tmp_path):
    path = tmp_path / "table"
    for saves, interval in ((False, 1e-6), (True, 1e6)):
        other = TableKeeper(table(), TableConfig(save_path=path, save_every_s=interval), MINE, saves=saves)
        other.save_when_due()
        other.wait()
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
    mine = TableKeeper(table(), config, MINE, saves=True)
    mine.save_when_due()
    mine.wait()
    assert "could not save" in caplog.text


def test_a_table_is_emptied_when_it_gets_too_old_on_disk_too(tmp_path, monkeypatch):
    path = tmp_path / "table"
    config = TableConfig(save_path=path, save_every_s=1e-6, retain_days=1)
    now = 1_000_000.0
    monkeypatch.setattr(keeper.time, "time", lambda: now)
    young = table()
    young.tokens[3, 0] = 7
    first = TableKeeper(young, config, MINE, saves=True)
    first.save_when_due()
    first.wait()
    now += 0.9 * keeper.SECONDS_PER_DAY
    restarted = table()
    second = TableKeeper(restarted, config, MINE, saves=True)
    assert int(restarted.tokens[3, 0]) == 7
    now += 0.2 * keeper.SECONDS_PER_DAY  # since the table was empty, not since it was loaded
    second.save_when_due()
    second.wait()
    assert int(restarted.tokens.max()) == -1
    late = table()
    TableKeeper(late, config, MINE, saves=True)
    assert int(late.tokens.max()) == -1
    old = tmp_path / "old"
    save_table(young, old, MINE, began=now - 2 * keeper.SECONDS_PER_DAY)
    TableKeeper(late, TableConfig(save_path=old, retain_days=1), MINE, saves=True)
    assert int(late.tokens.max()) == -1 and not old.exists()


def test_a_table_that_was_only_loaded_gets_too_old_while_it_is_served(tmp_path, monkeypatch):
    path = tmp_path / "table"
    now = 1_000_000.0
    monkeypatch.setattr(keeper.time, "time", lambda: now)
    taught = table()
    taught.tokens[3, 0] = 7
    save_table(taught, path, MINE, began=now)
    served = table()
    mine = TableKeeper(served, TableConfig(path=path, retain_days=1), MINE, saves=True)
    now += 0.9 * keeper.SECONDS_PER_DAY
    mine.save_when_due()
    assert int(served.tokens[3, 0]) == 7
    now += 0.2 * keeper.SECONDS_PER_DAY
    mine.save_when_due()
    assert int(served.tokens.max()) == -1 and path.exists()


def test_an_idle_server_looks_at_the_age_of_its_table(tmp_path, monkeypatch):
    from sgl_graft import algorithms
    from sgl_graft.graft.worker import GraftWorker
    from sgl_graft.serving.metrics import report_when_idle

    now = 1_000_000.0
    monkeypatch.setattr(keeper.time, "time", lambda: now)
    monkeypatch.setattr(algorithms, "selected_algorithm", lambda: "GRAFT")
    served = table()
    served.tokens[3, 0] = 7
    worker = object.__new__(GraftWorker)
    kept = TableKeeper(served, TableConfig(retain_days=1), MINE, saves=True)
    worker._draft_worker = SimpleNamespace(keeper=kept)
    context = SimpleNamespace(current_scheduler_metrics_enabled=False)
    scheduler = SimpleNamespace(draft_worker=worker, metrics_collector_context=context)
    report_when_idle(scheduler)
    assert int(served.tokens[3, 0]) == 7
    now += 1.1 * keeper.SECONDS_PER_DAY
    report_when_idle(scheduler)
    assert int(served.tokens.max()) == -1


@pytest.mark.parametrize("writing", [False, True])
def test_what_was_flushed_does_not_come_back_after_a_restart(tmp_path, monkeypatch, writing):
    saved, named = tmp_path / "saved", tmp_path / "named"
    now = 1_000_000.0
    monkeypatch.setattr(keeper.time, "time", lambda: now)
    served = table()
    served.tokens[3, 0] = 7
    save_table(served, named, MINE)
    config = TableConfig(save_path=saved, save_every_s=1e-6, retain_days=1)
    mine = TableKeeper(served, config, MINE, saves=True)
    if writing:  # the save is under way when the flush comes
        monkeypatch.setattr(keeper, "save_table", lambda *args: time.sleep(0.2) or save_table(*args))
    mine.save_when_due()
    if not writing:
        mine.wait()
        assert saved.exists()
    now += 0.9 * keeper.SECONDS_PER_DAY
    served.clear()
    mine.forgotten()
    mine.wait()
    assert not saved.exists() and named.exists()
    served.tokens[4, 0] = 8
    now += 0.2 * keeper.SECONDS_PER_DAY  # the table was empty when it was flushed
    mine.save_when_due()
    mine.wait()
    again = table()
    TableKeeper(again, config, MINE, saves=True)
    assert int(again.tokens[3, 0]) == -1 and int(again.tokens[4, 0]) == 8


def test_flushing_the_cache_of_a_worker_forgets_in_memory_and_on_disk(tmp_path, monkeypatch):
    from sgl_graft.graft import worker

    path = tmp_path / "table"
    served = table()
    served.tokens[3, 0] = 7
    kept = TableKeeper(served, TableConfig(save_path=path, save_every_s=1e-6), MINE, saves=True)
    kept.save_when_due()
    kept.wait()
    assert path.exists()
    monkeypatch.setattr(worker.stock.EAGLEWorkerV2, "clear_cache_pool", lambda self: None)
    flushed = object.__new__(worker.GraftWorker)
    flushed._draft_worker = SimpleNamespace(keeper=kept, graft=SimpleNamespace(clear=served.clear))
    flushed.clear_cache_pool()
    assert int(served.tokens.max()) == -1 and not path.exists()


def test_a_flush_leaves_files_alone_that_this_rank_does_not_write(tmp_path):
    path = tmp_path / "table"
    save_table(table(), path, MINE)
    TableKeeper(table(), TableConfig(path=path), MINE, saves=True).forgotten()
    TableKeeper(table(), TableConfig(save_path=path), MINE, saves=False).forgotten()
    assert path.exists()


def test_what_happened_is_counted(tmp_path):
    path = tmp_path / "table"
    path.write_bytes(b"damaged")
    kept = TableKeeper(table(), TableConfig(save_path=path, save_every_s=1e-6), MINE, saves=True)
    kept.save_when_due()
    kept.wait()
    assert (kept.saves, kept.failed_saves, kept.set_aside) == (1, 0, 1)
    path.unlink()
    path.mkdir()  # a folder in the file's place cannot be replaced
    kept.save_when_due()
    kept.wait()
    assert (kept.saves, kept.failed_saves) == (1, 1)


def test_every_rank_begins_with_what_rank_0_read(tmp_path):
    """Ranks on other nodes have other disks."""
    path = tmp_path / "table"
    saved = table()
    saved.tokens[3, 0] = 7
    save_table(saved, path, MINE, 1.7e9)
    found = []

    def on_first(decide):
        found.append(decide())
        return found[0]

    first, other = table(), table()
    config = TableConfig(save_path=path)
    TableKeeper(first, config, MINE, saves=True, agree=on_first)
    path.unlink()
    follower = TableKeeper(other, config, MINE, saves=False, agree=lambda decide: found[0])
    assert torch.equal(first.tokens, other.tokens) and follower.began == 1.7e9
