"""Online adaptation's decisions: what is kept, when it learns, when it goes back."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_graft.specblock.adaptation import store, wire
from sgl_graft.specblock.adaptation.bandit import (
    FULL,
    HEAD,
    MOST_PATIENCE,
    BanditSettings,
    CostAwareBandit,
)
from sgl_graft.specblock.adaptation.collect import (
    CONTEXT,
    LEAST,
    SEGMENT,
    Segment,
    SegmentCollector,
    ranks_of,
    wanted_tokens,
)
from sgl_graft.specblock.adaptation.evidence import EvidenceBuffer
from sgl_graft.specblock.adaptation.guard import SOON, TRIAL, AcceptGuard, Verdict

PIECES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), max_size=80)


# ---- evidence ----------------------------------------------------------------------------------------


@given(PIECES, st.integers(20, 120))
def test_the_buffer_is_bounded_and_keeps_the_newest(pieces: list[tuple[str, int]], capacity: int) -> None:
    buffer: EvidenceBuffer[int] = EvidenceBuffer(capacity)
    for serial, (domain, rows) in enumerate(pieces):
        buffer.add(domain, serial, rows)
        assert buffer.rows <= capacity
    kept = [serial for name in "abc" for serial in buffer.learnable(name, 10**6, others=0.0)]
    held = buffer.held(10**6)
    assert not set(kept) & set(held)
    assert sum(pieces[serial][1] for serial in {*kept, *held}) <= buffer.rows <= capacity
    if kept:
        newest = max(kept)
        assert all(held_ or serial <= newest for serial, held_ in [(s, s in held) for s in range(newest + 1)])
    buffer.clear()
    assert buffer.rows == 0 and not buffer.held(10**6) and not buffer.learnable("a", 10**6)


def test_a_share_of_other_domains_is_learned_again() -> None:
    buffer: EvidenceBuffer[str] = EvidenceBuffer(1000)
    for i in range(20):
        buffer.add("mine", f"mine{i}", 10)
        buffer.add("yours", f"yours{i}", 10)
    found = buffer.learnable("mine", 80, others=0.25)
    assert sum(piece.startswith("mine") for piece in found) == 6
    assert found[-1].startswith("yours") and found[5] == "mine18"  # every fifth, so mine19, is held back


# ---- bandit ------------------------------------------------------------------------------------------


def served(bandit: CostAwareBandit, domain: str, tokens: int) -> None:
    for _ in range(tokens // 2):
        bandit.served(domain, 2, 0.05)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 400)), max_size=60))
def test_nothing_is_learned_below_the_stated_traffic(loads: list[tuple[str, int]]) -> None:
    bandit = CostAwareBandit(BanditSettings(min_tokens=1000))
    seen = {"a": 0, "b": 0}
    for domain, tokens in loads:
        bandit.served(domain, tokens, tokens / 40)
        seen[domain] += tokens
        choice = bandit.choose()
        assert choice is None or seen[choice.domain] >= 1000


@given(st.floats(0.0, 0.05), st.lists(st.floats(-0.1, 0.0), max_size=60))
@settings(deadline=None)
def test_fruitless_updates_cost_a_bounded_share(explore: float, gains: list[float]) -> None:
    """Whatever was hoped, what is given up stays below the allowance plus one trial of each arm."""
    bandit = CostAwareBandit(BanditSettings(min_tokens=500, wait_tokens=200, explore=explore))
    spent = {HEAD: 0.0, FULL: 0.0}
    trials = {HEAD: 0, FULL: 0}
    for gain in gains:
        served(bandit, "a", 400)
        choice = bandit.choose()
        if choice is not None:
            seconds = {HEAD: 0.5, FULL: 5.0}[choice.arm]
            trials[choice.arm] += 1
            spent[choice.arm] += seconds if choice.explores else 0.0
            bandit.began(choice)
            bandit.learned("a", choice.arm, gain, seconds)
    per_second = bandit.tokens / max(bandit.seconds, 1e-9)
    assert sum(spent.values()) * per_second <= explore * bandit.tokens + 1e-6
    # Hope is used up after few trials; the rest was exploration.
    assert trials[FULL] <= 4 + spent[FULL] / 5.0 and trials[HEAD] <= 8 + spent[HEAD] / 0.5


def test_it_takes_the_arm_with_the_best_gain_for_its_cost() -> None:
    bandit = CostAwareBandit(BanditSettings(min_tokens=0, wait_tokens=0))
    served(bandit, "a", 20_000)
    bandit.learned("a", HEAD, 0.02, 1.0)
    bandit.learned("a", FULL, 0.03, 5.0)
    assert bandit.choose().arm == HEAD  # type: ignore[union-attr]
    for _ in range(6):
        bandit.learned("a", HEAD, 0.0, 1.0)  # its gain is used up
    served(bandit, "a", 200)
    choice = bandit.choose()
    assert choice is not None and choice.arm == FULL and choice.worth > choice.price


def test_it_skips_what_costs_more_than_it_brings() -> None:
    bandit = CostAwareBandit(BanditSettings(min_tokens=0, explore=0.0))
    served(bandit, "a", 2000)
    for arm in (HEAD, FULL):
        bandit.learned("a", arm, 0.001, 60.0)
    served(bandit, "a", 20_000)
    assert bandit.choose() is None and bandit.ready
    always = CostAwareBandit(BanditSettings(min_tokens=0, explore=0.0, always=True))
    always.restore(bandit.state())
    assert always.choose() is not None


@given(st.integers(1, 30))
def test_it_backs_off_and_forgives(failures: int) -> None:
    bandit = CostAwareBandit(BanditSettings(min_tokens=0, wait_tokens=100))
    for _ in range(failures):
        bandit.learned("a", FULL, -0.1, 1.0)
    arm = bandit.domains["a"].arms[FULL]
    assert arm.next_at == 100 * min(2.0**failures, MOST_PATIENCE)
    bandit.rolled_back("a", FULL)
    assert arm.gain == 0.0 and arm.patience <= MOST_PATIENCE
    bandit.learned("a", FULL, 0.1, 1.0)
    assert arm.patience == 1.0


def test_what_it_learned_survives_a_round_trip_through_json() -> None:
    bandit = CostAwareBandit(BanditSettings(min_tokens=0))
    served(bandit, "a", 500)
    bandit.learned("a", HEAD, 0.04, 0.7)
    again = CostAwareBandit(BanditSettings(min_tokens=0))
    again.restore(json.loads(json.dumps(bandit.state())))
    assert again.state() == bandit.state() and again.choose() == bandit.choose()
    with pytest.raises((KeyError, TypeError, ValueError)):
        again.restore({"domains": {"a": {"arms": {}}}})


# ---- guard -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(2, 5), min_size=60, max_size=200))
def test_a_collapse_shows_within_fifty_rounds(before: list[int]) -> None:
    guard = AcceptGuard()
    guard.observe(before)
    guard.swapped()
    bad = 0
    while guard.verdict() is not Verdict.FALL:
        guard.observe([1])
        bad += 1
        assert bad <= 50
    assert bad == SOON


def test_equal_weights_are_kept() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        guard = AcceptGuard()
        guard.observe(draw.choice([1, 2, 3, 4]) for _ in range(800))
        guard.swapped()
        guard.observe(draw.choice([1, 2, 3, 4]) for _ in range(TRIAL))
        assert guard.verdict() is Verdict.KEEP, seed


def test_a_slow_fall_is_found_when_the_trial_ends() -> None:
    guard = AcceptGuard()
    guard.observe([2, 3] * 400)
    guard.swapped()
    guard.observe([2] * (TRIAL - 1))
    assert guard.verdict() is Verdict.TRIAL
    guard.observe([2])
    assert guard.verdict() is Verdict.FALL
    guard.undone()
    assert guard.verdict() is Verdict.NONE


# ---- messages and files ------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 7), max_size=3), st.text(max_size=20))
def test_messages_arrive_as_they_were_sent(shape: list[int], text: str) -> None:
    tensors = {"a": torch.randn(shape).bfloat16(), "b": torch.arange(5), "c": torch.tensor(3)}
    stream = io.BytesIO()
    wire.send(stream, {"text": text}, tensors)
    wire.send(stream, {"second": True})
    stream.seek(0)
    header, found = wire.receive(stream)
    assert header == {"text": text} and all(torch.equal(found[n], t) for n, t in tensors.items())
    assert wire.receive(stream) == ({"second": True}, {})
    with pytest.raises(EOFError):
        wire.receive(stream)


def test_adapted_weights_are_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    flat = torch.randn(1000).bfloat16()
    store.save(tmp_path, flat, 7, "base", {"domains": {}})
    found = store.load(tmp_path, "base", 1000)
    assert found is not None and torch.equal(found.flat, flat) and found.version == 7
    assert [f.name for f in tmp_path.iterdir()] == [store.FILE]
    assert (tmp_path / store.FILE).stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="adapted from another draft"):
        store.load(tmp_path, "another", 1000)


@pytest.mark.parametrize("damage", ["cut", "flipped", "text"])
def test_a_damaged_state_is_set_aside(tmp_path: Path, damage: str) -> None:
    store.save(tmp_path, torch.randn(1000).bfloat16(), 7, "base", {"domains": {}})
    file = tmp_path / store.FILE
    data = bytearray(file.read_bytes())
    if damage == "cut":
        data = data[:-100]
    elif damage == "flipped":
        data[-50] ^= 4
    else:
        data = bytearray(b"not a file of weights")
    file.write_bytes(data)
    assert store.load(tmp_path, "base", 1000) is None
    assert not file.exists() and file.with_name(file.name + ".damaged").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"state_dir .*file/folder cannot be written"):
        store.check_writable(tmp_path / "file" / "folder")


# ---- evidence from rounds ----------------------------------------------------------------------------


@given(
    st.integers(1, 400),
    st.lists(st.integers(1, 5), max_size=120),
    st.integers(1, 150),
)
@settings(max_examples=60, deadline=None)
def test_segments_hold_every_answer_row_once(prompt: int, rounds: list[int], chunk: int) -> None:
    """Rows of one request, numbered: whatever the chunks and rounds, answers come once and in order."""
    found: list[tuple[str, Segment, int]] = []
    collector = SegmentCollector(lambda *piece: found.append(piece))

    def rows(first: int, count: int) -> tuple[torch.Tensor, ...]:
        numbers = torch.arange(first, first + count)
        return numbers.float().unsqueeze(1), numbers.float().unsqueeze(1), numbers

    at = 0
    while at < prompt:
        count = min(chunk, prompt - at)
        collector.prompt("r", "d", *rows(at, count), whole=at + count == prompt)
        at += count
    for count in rounds:
        collector.answer("r", *rows(at, count))
        at += count
    collector.answer("unknown", *rows(0, 3))
    collector.finish("r")
    assert not collector._open
    answered = [int(t) for _, segment, _ in found for t in segment.tokens[segment.answer :]]
    total = 1 + sum(rounds)
    assert answered == list(range(prompt - 1, prompt - 1 + len(answered)))
    assert len(answered) <= total and total - len(answered) < LEAST
    for domain, segment, count in found:
        assert domain == "d" and count == len(segment.tokens) - segment.answer < SEGMENT + 5
        assert segment.answer <= CONTEXT and torch.equal(segment.features[:, 0].long(), segment.tokens)
        assert torch.equal(segment.tokens.diff(), torch.ones(len(segment.tokens) - 1, dtype=torch.long))


def test_ranks_and_wanted_tokens() -> None:
    committed = torch.tensor([[5, 6, 7, 0], [9, 0, 0, 0]])
    wanted = wanted_tokens(committed, torch.tensor([3, 1]), block=3)
    assert wanted.tolist() == [[5, 6, 7], [9, -1, -1]]
    proposed = torch.tensor([[[5, 1], [1, 6], [1, 2]], [[1, 9], [1, 2], [1, 2]]])
    assert ranks_of(proposed, wanted).tolist() == [[0, 1, 2], [1, -1, -1]]
    assert wanted_tokens(committed[:, :2], torch.tensor([2, 1]), block=3).tolist() == [
        [5, 6, -1],
        [9, -1, -1],
    ]
