"""Saved tables: exact round trip, refusals, truncation at any byte, a full disk."""

import stat

import pytest
import torch
from sgl_graft.cuda_graph.successor_table import SuccessorTable

from sgl_graft.graft import store
from sgl_graft.graft.store import TableIdentity, forget, load_table, read_own_table, save_table

MINE = TableIdentity(target="t", tokenizer="k")


def make(vocab_size=20, k=3, context_rows=8):
    return SuccessorTable.create(vocab_size, k=k, context_rows=context_rows)


def filled(**sizes):
    table = make(**sizes)
    generator = torch.Generator().manual_seed(1)
    table.tokens.copy_(torch.randint(-1, 20, table.tokens.shape, generator=generator))
    table.probs.copy_(torch.rand(table.probs.shape, generator=generator))
    table.tags.copy_(torch.randint(-1, 99, table.tags.shape, generator=generator))
    return table


def test_round_trip_is_exact_and_private(tmp_path):
    path, table, other = tmp_path / "a" / "table", filled(), make()
    save_table(table, path, MINE)
    load_table(other, path, MINE)
    for name in ("tokens", "probs", "tags"):
        assert torch.equal(getattr(table, name), getattr(other, name))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["table"]


@pytest.mark.parametrize(
    ("identity", "sizes", "named"),
    [
        (TableIdentity("other", "k"), {}, "target"),
        (TableIdentity("t", "other"), {}, "tokenizer"),
        (MINE, {"vocab_size": 21}, "vocab_size"),
        (MINE, {"k": 4}, "k "),
        (MINE, {"context_rows": 16}, "context_rows"),
    ],
)
def test_a_foreign_table_is_refused_and_named(tmp_path, identity, sizes, named):
    path = tmp_path / "table"
    save_table(filled(), path, MINE)
    with pytest.raises(ValueError, match=named):
        load_table(make(**sizes), path, identity)


def test_truncation_anywhere_is_noticed_and_set_aside(tmp_path):
    path = tmp_path / "table"
    save_table(filled(), path, MINE)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cannot be read"):
            load_table(make(), path, MINE)
    table = make()
    assert read_own_table(table, path, MINE) is None
    assert not path.exists() and path.with_suffix(".damaged").exists()
    assert int(table.tokens.max()) == -1
    forget(path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_loses_nothing_saved_before(tmp_path, monkeypatch):
    path = tmp_path / "table"
    save_table(filled(), path, MINE)
    before = path.read_bytes()

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_table(make(), path, MINE)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["table"]


def test_forgetting_takes_what_a_killed_save_left(tmp_path):
    path = tmp_path / "table[1]"
    save_table(filled(), path, MINE)
    (tmp_path / f".{path.name}.123.tmp").write_bytes(path.read_bytes())
    other = tmp_path / ".table1.123.tmp"
    other.write_bytes(b"")
    assert forget(path)
    assert list(tmp_path.iterdir()) == [other]
