"""Policies as batched tensors: what each chooses, and when it falls back to the default."""

import json
import logging

import pytest
import torch

from sgl_graft.blockpilot.costs import CostTable, read_costs, write_costs
from sgl_graft.blockpilot.ewma import AcceptHistory, EwmaPolicy
from sgl_graft.blockpilot.mlp import MlpPolicy
from sgl_graft.blockpilot.policy import FixedPolicy, Prefilled, Round, read_replay
from sgl_graft.blockpilot.policy_file import (
    PolicyDocument,
    head_fingerprint,
    misfit,
    read_policy,
    usable,
    write_policy,
)
from sgl_graft.blockpilot.predictor import Head, Predictor
from sgl_graft.blockpilot.speed import expected_tokens, fastest_sizes, fastest_width

SIZES = (6, 7, 8, 9, 10)


def prefilled(names, hidden=None, temperature=0.0):
    count = len(names)
    return Prefilled(torch.arange(count), hidden, torch.full((count,), temperature), tuple(names))


def finished(names, accepted, block_lens):
    rows = torch.arange(len(names))
    return Round(rows, torch.tensor(block_lens), torch.tensor(accepted), len(names), tuple(names))


def document(**changes):
    fields = {"policy": "mlp", "default": 8, "candidates": SIZES, "weights": "w.safetensors"}
    return PolicyDocument(**(fields | changes))


def test_fixed_never_changes():
    policy = FixedPolicy(8)
    assert policy.first(prefilled("ab")).tolist() == [8, 8]
    assert policy.again(finished("ab", [0, 7], [8, 8])) is None


def test_replay_follows_its_recording(tmp_path):
    path = tmp_path / "replay.json"
    path.write_text(json.dumps({"sizes": {"a": [3, 5], "b": 7}, "default": 4}))
    policy = read_replay(path, 8)
    assert policy.first(prefilled("abc")).tolist() == [3, 7, 4]
    assert policy.again(finished("abc", [0, 0, 0], [3, 7, 4])).tolist() == [5, 7, 4]
    assert policy.again(finished("ca", [0, 0], [4, 5])).tolist() == [4, 5]


def test_replay_draws_new_sizes_every_round_alike_everywhere(tmp_path):
    path = tmp_path / "replay.json"
    path.write_text(json.dumps({"random": {"seed": 3, "low": 1, "high": 10}}))
    runs = []
    for _ in range(2):
        policy = read_replay(path, 8)
        drawn = [policy.first(prefilled("ab")).tolist()]
        drawn += [policy.again(finished("ab", [0, 0], [1, 1])).tolist() for _ in range(60)]
        runs.append(drawn)
    assert runs[0] == runs[1]
    flat = [size for row in runs[0] for size in row]
    assert set(flat) == set(range(1, 11))
    assert [a for a, _ in runs[0]] != [b for _, b in runs[0]]


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"sizes": {"a": [0]}}', '{"other": 1}', '{"random": {"seed": 1, "low": 5, "high": 2}}'],
)
def test_a_bad_recording_is_refused(tmp_path, text):
    path = tmp_path / "replay.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"replay\.json cannot be used"):
        read_replay(path, 8)


def test_mlp_maps_classes_to_candidates():
    predictor = Predictor(4, 5, width=16).eval()
    with torch.no_grad():
        hidden = torch.randn(40, 4)
        wanted = [SIZES[i] for i in predictor(hidden).argmax(1).tolist()]
    policy = MlpPolicy(document(), predictor)
    assert policy.first(prefilled([str(i) for i in range(40)], hidden)).tolist() == wanted
    assert len(set(wanted)) > 1


def test_mlp_outside_its_temperatures_takes_the_default_and_says_so_once(caplog):
    policy = MlpPolicy(document(temperatures=(0.5, 1.0)), Predictor(4, 5, width=16).eval())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert policy.first(prefilled("ab", torch.randn(2, 4), 0.0)).tolist() == [8, 8]
    assert sum("temperatures 0.5 to 1" in r.message for r in caplog.records) == 1
    assert policy.defaulted == {"policy": 0, "temperature": 6}
    mixed = Prefilled(torch.arange(2), torch.randn(2, 4), torch.tensor([0.0, 0.7]), ("a", "b"))
    assert policy.first(mixed)[0] == 8
    assert policy.defaulted["temperature"] == 7


def test_mlp_disabled_takes_the_default(caplog):
    policy = MlpPolicy(document(), Predictor(4, 5, width=16).eval())
    policy.disable("the target's weights were updated")
    assert policy.first(prefilled("a", torch.randn(1, 4))).tolist() == [8]
    assert not policy.reads_hidden and policy.defaulted["policy"] == 1
    assert "weights were updated" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"candidates": (6, 7)},
        {"candidates": (8, 7)},
        {"candidates": (0, 8)},
        {"weights": ""},
        {"weights": "../elsewhere"},
        {"temperatures": (1.0, 0.5)},
        {"format": 2},
        {"policy": "fixed"},
    ],
)
def test_an_inconsistent_document_is_refused(changes):
    with pytest.raises(ValueError):
        document(**changes)


def test_a_policy_is_written_and_read_whole(tmp_path):
    predictor = Predictor(4, 5, width=16).eval()
    head = Head(torch.randn(100, 4), 100)
    path = write_policy(
        tmp_path, document(vocab_size=100, head=head_fingerprint(head.weight, 100)), predictor
    )
    read, again, reads_logits = read_policy(path)
    assert read.candidates == SIZES and not reads_logits
    x = torch.randn(3, 4)
    assert torch.equal(usable(again, reads_logits, head, lambda t: t)(x), predictor(x))
    (tmp_path / "w.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be used"):
        read_policy(path)


def test_a_released_checkpoint_is_a_policy(tmp_path):
    torch.save(Predictor(100, 5, width=16).bfloat16().state_dict(), tmp_path / "model.pt")
    read, predictor, reads_logits = read_policy(tmp_path / "model.pt")
    assert (read.candidates, read.default, read.vocab_size) == ((14, 15, 16, 17, 18), 16, 100)
    assert reads_logits
    folded = usable(predictor, reads_logits, Head(torch.randn(100, 4), 100), lambda t: t)
    assert folded.inputs == 4
    torch.save(Predictor(100, 7, width=16).state_dict(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match="7 classes"):
        read_policy(tmp_path / "model.pt")


def test_misfits_are_named():
    own = document(vocab_size=100, head="abc")
    assert misfit(own, 100, "abc", 10) is None
    assert "vocabulary of 100" in misfit(own, 99, "abc", 10)
    assert "LM head abc" in misfit(own, 100, "xyz", 10)
    assert "above the server's 9" in misfit(own, 100, "abc", 9)


def test_head_fingerprint_sees_other_weights():
    weight = torch.randn(100, 4)
    assert head_fingerprint(weight, 100) == head_fingerprint(torch.cat((weight, torch.ones(28, 4))), 100)
    assert head_fingerprint(weight, 100) != head_fingerprint(weight + 0.1, 100)


def test_expected_tokens_sum_the_survival():
    tokens = expected_tokens(torch.tensor([[0.5, 0.5, 0.0]]))
    assert tokens.tolist() == [[1.0, 1.5, 1.75, 1.75]]


def test_fastest_sizes_prefers_the_default_in_a_tie():
    tokens = torch.tensor([[1.0, 2.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    sizes = torch.tensor([1, 2, 3, 4])
    cost = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert fastest_sizes(tokens, sizes, cost, 2).tolist() == [2, 1]
    assert fastest_sizes(tokens, sizes, cost, 4).tolist() == [1, 1]


def test_the_load_aware_cap_shortens_blocks_where_rows_cost():
    tokens = expected_tokens(torch.full((8, 7), 0.7))
    widths = torch.tensor([1, 2, 4, 8])
    wanted = torch.full((8,), 8)
    flat = torch.tensor([1.0, 1.01, 1.02, 1.03])  # batch 1: rows are free
    steep = torch.tensor([1.0, 1.5, 2.6, 5.0])  # large batch: verifying rules
    assert fastest_width(tokens, wanted, widths, flat) == 8
    assert fastest_width(tokens, wanted, widths, steep) in (1, 2)
    assert fastest_width(tokens, torch.full((8,), 2), widths, flat) == 2


def test_ewma_finds_the_fastest_size_of_each_request():
    costs = CostTable(seconds={1: {1: 1.0, 2: 1.3, 16: 2.5}})
    history = AcceptHistory(4, 16)
    policy = EwmaPolicy(history, (2, 4, 8, 16), 8, costs)
    sizes = policy.first(prefilled("ab"))
    assert sizes.tolist() == [8, 8]
    generator = torch.Generator().manual_seed(0)
    rates = (0.95, 0.05)
    for _ in range(200):
        runs = []
        for rate, size in zip(rates, sizes.tolist(), strict=True):
            wrong = (torch.rand(size - 1, generator=generator) > rate).nonzero()
            runs.append(int(wrong[0]) if len(wrong) else size - 1)
        done = finished("ab", runs, sizes.tolist())
        history.observe(done.rows, done.block_lens, done.accepted)
        sizes = policy.again(done)
        last = sizes.tolist()
    assert last[0] == 16
    assert last[1] in (1, 8)  # off, or the probe
    offs = 0
    for _ in range(66):
        done = finished("ab", [15, 0], sizes.tolist())
        history.observe(done.rows, done.block_lens, done.accepted)
        sizes = policy.again(done)
        offs += int(sizes[1] == 1)
    assert 60 <= offs < 66  # speculation is off, and tried again now and then


def test_ewma_history_forgets_when_a_row_changes_hands():
    history = AcceptHistory(2, 8)
    rows = torch.tensor([0])
    for _ in range(20):
        history.observe(rows, torch.tensor([8]), torch.tensor([0]))
    low = history.expected_tokens(rows)[0, -1]
    history.begin(rows)
    assert history.expected_tokens(rows)[0, -1] > low


def test_a_round_without_drafts_teaches_nothing():
    history = AcceptHistory(2, 8)
    rows = torch.tensor([0, 1])
    history.observe(rows, torch.tensor([8, 8]), torch.tensor([3, 0]))
    before = (history.hits.clone(), history.got.clone(), history.due.clone())
    history.observe(rows, torch.tensor([1, 1]), torch.tensor([0, 0]))
    assert torch.equal(history.hits, before[0])
    assert torch.equal(history.got, before[1]) and torch.equal(history.due, before[2])


def test_costs_interpolate_and_take_the_next_larger_batch(tmp_path):
    table = CostTable(seconds={1: {1: 1.0, 5: 3.0}, 8: {1: 2.0, 5: 6.0}})
    assert table.cost(1, 3) == 2.0 and table.cost(1, 9) == 3.0
    assert table.cost(2, 5) == 6.0 and table.cost(99, 1) == 2.0
    write_costs(tmp_path / "c.json", table)
    assert read_costs(tmp_path / "c.json") == table
    (tmp_path / "c.json").write_text('{"seconds": {}}')
    with pytest.raises(ValueError, match=r"c\.json cannot be used"):
        read_costs(tmp_path / "c.json")
