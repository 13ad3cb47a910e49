"""The learning copy: it learns, it is judged, and no harm that comes to it reaches the draft that serves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_graft.config import AdaptationConfig
from sgl_graft.draft_training.vocab import DraftVocab
from sgl_graft.specblock.adaptation import store
from sgl_graft.specblock.adaptation.adaptation import AWAY, Adaptation, Ranks
from sgl_graft.specblock.adaptation.bandit import FULL, HEAD, BanditSettings, CostAwareBandit
from sgl_graft.specblock.adaptation.collect import Heads, Segment
from sgl_graft.specblock.adaptation.director import MOST_STARTS, Director
from sgl_graft.specblock.adaptation.learner import Learner, LearnSettings, Update, parameters_of
from sgl_graft.specblock.adaptation.process import LearnerProcess
from sgl_graft.specblock.adaptation.setup import make_adaptation, make_director
from sgl_graft.specblock.adaptation.weights import WeightArea, digest_of
from sgl_graft.specblock.model import SpecBlockDraft

BLOCK, WIDTH, FEATURES = 4, 32, 96
FAST = LearnSettings(full_rate=5e-3, head_rate=5e-3, bf16=False)


def segments(vocab: DraftVocab, count: int, rows: int = 40, seed: int = 0) -> list[Segment]:
    """Answers in which each token tells the next."""
    random = torch.Generator().manual_seed(seed)
    table = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(5))
    found = []
    for i in range(count):
        cycle = vocab.draft_to_target[[(3 * i + 7 * j) % 21 for j in range(rows)]]
        features = torch.randn(rows, FEATURES, generator=random).bfloat16()
        found.append(Segment(features, table[cycle].bfloat16(), cycle, answer=8))
    return found


def heads(vocab: DraftVocab, count: int, seed: int = 0) -> list[Heads]:
    """Hidden states that tell the wanted token."""
    random = torch.Generator().manual_seed(seed)
    table = torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(6))
    found = []
    for _ in range(count):
        ids = torch.randint(0, 30, (16, BLOCK), generator=random)
        wanted = vocab.draft_to_target[ids].clone()
        wanted[:, -1] = -1
        found.append(Heads(table[ids].bfloat16(), wanted))
    return found


@pytest.mark.parametrize("arm", [HEAD, FULL])
def test_an_update_helps_on_rows_it_did_not_see(draft: SpecBlockDraft, vocab: DraftVocab, arm: str) -> None:
    learner = Learner(draft, vocab, FAST)
    before = {n: p.detach().clone() for n, p in draft.named_parameters()}
    for _ in range(4):
        if arm == FULL:
            update = learner.full(segments(vocab, 24), segments(vocab, 6, seed=1))
        else:
            update = learner.head(heads(vocab, 24), heads(vocab, 6, seed=1))
    assert update.after > 1.15 * before_any(draft, before, vocab, arm)
    changed = {n for n, p in draft.named_parameters() if not torch.equal(p, before[n])}
    assert changed == set(parameters_of(draft, arm))
    assert update.seconds > 0 and update.steps > 0


def before_any(draft: SpecBlockDraft, weights: dict[str, torch.Tensor], vocab: DraftVocab, arm: str) -> float:
    """What the untouched draft reaches on the held rows."""
    fresh = SpecBlockDraft(draft.config)
    fresh.load_state_dict(weights, strict=False)
    learner = Learner(fresh, vocab, FAST)
    if arm == FULL:
        return learner.judge_segments(segments(vocab, 6, seed=1))
    return learner.judge_heads(heads(vocab, 6, seed=1))


def test_an_update_is_undone(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    learner = Learner(draft, vocab, FAST)
    before = WeightArea.private(draft).flat
    learner.full(segments(vocab, 4), segments(vocab, 2, seed=1))
    assert not torch.equal(WeightArea.private(draft).flat, before)
    learner.undo()
    assert torch.equal(WeightArea.private(draft).flat, before)


def test_weights_that_are_no_numbers_are_judged_worthless(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    learner = Learner(draft, vocab, FAST)
    served = WeightArea.private(draft)
    sick = WeightArea.private(draft)
    assert sick.problem(served) is None
    sick.views["lm_head.weight"][0, 0] = float("nan")
    assert sick.problem(served) == "they are not all finite"
    sick.write_to(draft)
    assert learner.judge_segments(segments(vocab, 2)) == 1.0
    sick = WeightArea.private(draft)
    sick.views["lm_head.weight"].fill_(1e4)
    assert "lm_head.weight grew from a norm of" in str(sick.problem(served))


def test_evidence_of_nothing_the_draft_could_say_changes_nothing(
    draft: SpecBlockDraft, vocab: DraftVocab
) -> None:
    """Tokens outside the draft's vocabulary teach the rank head only."""
    outside = int((vocab.target_to_draft < 0).nonzero()[0])
    learner = Learner(draft, vocab, FAST)
    before = draft.lm_head.weight.detach().clone()
    learner.head([Heads(torch.randn(8, BLOCK, WIDTH).bfloat16(), torch.full((8, BLOCK), outside))], [])
    assert torch.equal(draft.lm_head.weight, before)


# ---- the process ---------------------------------------------------------------------------------------


def until(true: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := true():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def test_the_process_learns_saves_and_dies_without_harm(
    draft: SpecBlockDraft, vocab: DraftVocab, tmp_path: Path
) -> None:
    """One real process: an update, a save, a second update after a reset, then SIGKILL."""
    served = WeightArea.private(draft)
    served.write_to(draft)
    shipped = served.flat.clone()
    director = eager_director(draft, vocab, served, save={"folder": str(tmp_path), "base": "b"})
    adaptation = alone(draft, served, director)
    for piece in segments(vocab, 25):
        director.segments.add("default", piece, 32)
    director.bandit.served("default", 10_000, 1000.0)
    until(lambda: rounds(adaptation) or director.version)
    assert director.counts[FULL] >= 1 and not torch.equal(served.flat, shipped)
    own = dict(draft.named_parameters())
    assert all(torch.equal(own[n].bfloat16(), view) for n, view in served.views.items())
    director.guard.observe([5] * 400)  # the trial ends well
    until(lambda: rounds(adaptation) or (tmp_path / store.FILE).exists())
    saved = until(lambda: store.load(tmp_path, "b", served.flat.numel()))
    assert saved.version >= 1 and saved.bandit["domains"]["default"]["arms"][FULL]["trials"] >= 1

    learner = director._learner
    assert isinstance(learner, LearnerProcess)
    os.kill(learner.pid, signal.SIGKILL)
    serving = WeightArea.private(draft).flat
    until(lambda: rounds(adaptation) or director.counts["crashed"])
    assert torch.equal(WeightArea.private(draft).flat, serving)

    assert adaptation.rollback(0) == 0 and adaptation.version == 0
    assert torch.equal(WeightArea.private(draft).flat, shipped)
    with pytest.raises(ValueError, match="no version 99 to go back to"):
        adaptation.rollback(99)
    director.close()


def eager_director(draft: SpecBlockDraft, vocab: DraftVocab, served: WeightArea, **others: Any) -> Director:
    def start() -> LearnerProcess:
        return LearnerProcess(draft, vocab.draft_to_target, served, FAST, share=1.0, nice=0)

    bandit = CostAwareBandit(BanditSettings(min_tokens=0, wait_tokens=0, arms=(FULL,)))
    return Director(start, served, served.flat.clone(), bandit, 4096, 512, **others)


def alone(draft: SpecBlockDraft, served: WeightArea, director: Director | None) -> Adaptation:
    return Adaptation(draft, served, Ranks(), director, 1, lambda _: (None, True))


def rounds(adaptation: Adaptation) -> None:
    """A round passes in which nothing happens."""
    adaptation.swap_when_due()


def test_a_restart_goes_on_with_what_was_saved(
    draft: SpecBlockDraft, vocab: DraftVocab, tmp_path: Path
) -> None:
    config = AdaptationConfig(enabled=True, state_dir=tmp_path)
    served = WeightArea.private(draft)
    served.write_to(draft)
    first = make_director(draft, vocab.draft_to_target, config, served)
    first.bandit.served("default", 500, 10.0)
    better = (served.flat.float() * 1.01).bfloat16()
    base = digest_of(served.flat)
    store.save(tmp_path, better, 3, base, first.bandit.state())

    again = make_adaptation(draft, vocab.draft_to_target, config, Ranks(), lambda: None)
    assert again.version == 3 and again.director is not None and again.director.bandit.tokens == 500
    assert torch.equal(WeightArea.private(draft).flat, better)
    assert again.rollback(0) == 0 and torch.equal(WeightArea.private(draft).flat, served.flat)

    store.save(tmp_path, better, 3, base, {"domains": {"default": {}}})
    fresh = make_director(draft, vocab.draft_to_target, config, WeightArea.private(draft))
    assert fresh.version == 0 and not (tmp_path / store.FILE).exists()
    store.save(tmp_path, better, 3, "another draft", first.bandit.state())
    with pytest.raises(ValueError, match="adapted from another draft"):
        make_director(draft, vocab.draft_to_target, config, WeightArea.private(draft))


# ---- wrong answers -------------------------------------------------------------------------------------


class FakeLearner:
    """Answers every update at once with weights that a test made."""

    def __init__(self, draft: SpecBlockDraft, poison: Callable[[WeightArea], None], claims: float) -> None:
        self.area = WeightArea.private(draft)
        self._good = self.area.flat.clone()
        self._poison, self._claims = poison, claims
        self._answers: list[tuple[Update, str | None]] = []
        self.jobs: list[str] = []
        self.alive = True

    def send(self, header: dict[str, Any], tensors: Any = None) -> bool:
        self.jobs.append(header["job"])
        if header["job"] == "update":
            known = WeightArea({n: v.shape for n, v in self.area.views.items()}, self._good.clone())
            self._poison(self.area)
            problem = self.area.problem(known)
            self._answers.append((Update(header["arm"], 2.0, self._claims, 1.0, 1), problem))
        return True

    def answer(self) -> tuple[Update, str | None] | None:
        return self._answers.pop() if self._answers else None

    def close(self) -> None:
        self.alive = False


def poisoned(
    draft: SpecBlockDraft, vocab: DraftVocab, poison: Callable[[WeightArea], None], claims: float = 3.0
) -> tuple[Adaptation, Director, FakeLearner]:
    served = WeightArea.private(draft)
    served.write_to(draft)
    fake = FakeLearner(draft, poison, claims)
    bandit = CostAwareBandit(BanditSettings(min_tokens=0, wait_tokens=0, arms=(FULL,)))
    director = Director(lambda: fake, served, served.flat.clone(), bandit, 4096, 512)
    for piece in segments(vocab, 25):
        director.segments.add("default", piece, 32)
    bandit.served("default", 10_000, 1000.0)
    director.guard.observe([3, 2, 4] * 100)
    return Adaptation(draft, served, Ranks(), director, 16, lambda _: (None, True)), director, fake


def test_nan_never_serves(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    adaptation, director, fake = poisoned(draft, vocab, lambda area: area.flat.fill_(float("nan")))
    for _ in range(50):
        rounds(adaptation)
    assert adaptation.version == 0 and director.counts["refused"] >= 1 and "reset" in fake.jobs
    assert WeightArea.private(draft).flat.isfinite().all()
    assert director.bandit.domains["default"].arms[FULL].patience > 1


def test_an_explosion_is_taken_back_within_fifty_rounds(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    """Finite, no larger, and said to be good: only what verifies commit tells."""

    def scramble(area: WeightArea) -> None:
        head = area.views["lm_head.weight"]
        head.copy_(-head)

    adaptation, director, fake = poisoned(draft, vocab, scramble)
    shipped = WeightArea.private(draft).flat
    while adaptation.version == 0:
        rounds(adaptation)
    bad = 0
    while adaptation.version == 1:
        assert not torch.equal(WeightArea.private(draft).flat, shipped)
        director.guard.observe([1])
        rounds(adaptation)
        bad += 1
    assert bad <= 50 and adaptation.version == 0 and director.counts["rolled_back"] == 1
    assert torch.equal(WeightArea.private(draft).flat, shipped) and fake.jobs[-1] == "reset"


def test_an_update_without_gain_is_not_served(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    adaptation, _, fake = poisoned(draft, vocab, lambda area: area.flat.mul_(1.01), claims=2.0)
    for _ in range(40):
        rounds(adaptation)
    assert adaptation.version == 0 and fake.jobs[:2] == ["update", "undo"]


def test_paused_means_that_nothing_new_serves(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    adaptation, _, fake = poisoned(draft, vocab, lambda area: area.flat.mul_(1.01))
    adaptation.pause()
    for _ in range(40):
        rounds(adaptation)
    assert not fake.jobs and adaptation.status()["state"] == "paused"
    adaptation.resume()
    for _ in range(40):
        rounds(adaptation)
    assert adaptation.version == 1 and adaptation.status()["state"] == "trial"
    assert adaptation.rollback() == 0


def test_a_learner_that_always_dies_is_given_up(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    adaptation, director, _ = poisoned(draft, vocab, lambda area: None)

    class Dead(FakeLearner):
        def send(self, header: dict[str, Any], tensors: Any = None) -> bool:
            self.alive = False
            return True

    director._start_learner = lambda: Dead(draft, lambda area: None, 3.0)
    for _ in range(600):
        director.bandit.served("default", 2000, 50.0)
        rounds(adaptation)
    assert director.counts["crashed"] == MOST_STARTS and adaptation.status()["state"] == "given up"


def follower_of(draft: SpecBlockDraft, sent: list[torch.Tensor]) -> Adaptation:
    """Rank 1's, which receives what rank 0 sent."""
    served = WeightArea.private(draft)
    served.write_to(draft)
    ranks = Ranks(1, 2, lambda tensor: tensor.copy_(sent.pop(0)))
    return Adaptation(draft, served, ranks, None, 16, lambda _: (None, True))


def test_ranks_begin_with_what_the_first_had_saved(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    """Only rank 0 reads the state folder."""
    sent: list[torch.Tensor] = []
    other = SpecBlockDraft(draft.config)
    other.load_state_dict(draft.state_dict())
    _, director, _ = poisoned(draft, vocab, lambda area: None)
    director.served.flat.mul_(1.01)
    director.version = 3
    ranks = Ranks(0, 2, lambda tensor: sent.append(tensor.clone()))
    first = Adaptation(draft, director.served, ranks, director, 16, lambda _: (None, True))
    follower = follower_of(other, sent)
    assert first.version == follower.version == 3 and not sent
    assert torch.equal(WeightArea.private(other).flat, WeightArea.private(draft).flat)


def test_a_learner_that_cannot_start_costs_no_request(
    draft: SpecBlockDraft, vocab: DraftVocab, caplog: pytest.LogCaptureFixture
) -> None:
    adaptation, director, _ = poisoned(draft, vocab, lambda area: None)

    def start() -> Any:
        raise OSError("Resource temporarily unavailable")

    director._start_learner = start
    for _ in range(600):
        director.bandit.served("default", 2000, 50.0)
        rounds(adaptation)
    assert director.counts["crashed"] == MOST_STARTS and adaptation.status()["state"] == "given up"
    assert "did not start" in caplog.text


def test_a_request_id_that_is_used_again_is_another_request(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    adaptation, _, _ = poisoned(draft, vocab, lambda area: None)
    adaptation.labels = lambda request: (None, request.learns)

    def request(learns: bool) -> Any:
        return SimpleNamespace(rid="same", learns=learns, finished=lambda: False)

    first, second = request(True), request(False)
    assert adaptation._follow(first).learns and adaptation._follow(first).request is first
    assert not adaptation._follow(second).learns
    adaptation.rounds += AWAY + 1  # retracted, and aborted while it waited: nobody says so
    adaptation._forget_finished()
    assert not adaptation._followed


def test_ranks_take_over_what_the_first_decides(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    """Two ranks in one process: whatever rank 0 broadcasts, rank 1 receives next."""
    sent: list[torch.Tensor] = []
    other = SpecBlockDraft(draft.config)
    other.load_state_dict(draft.state_dict())
    adaptation, _, _ = poisoned(draft, vocab, lambda area: area.flat.mul_(1.01))
    adaptation.ranks = Ranks(0, 2, lambda tensor: sent.append(tensor.clone()))
    sent.append(torch.tensor([adaptation.version]))
    follower = follower_of(other, sent)
    for _ in range(48):
        rounds(adaptation)
        rounds(follower)
        assert follower.version == adaptation.version and not sent
        assert torch.equal(WeightArea.private(other).flat, WeightArea.private(draft).flat)
    assert follower.version == 1
    adaptation.rollback()
    follower.rollback()
    assert follower.version == 0 and not sent
    with pytest.raises(ValueError):
        adaptation.rollback(5)
    with pytest.raises(ValueError):
        follower.rollback(5)
