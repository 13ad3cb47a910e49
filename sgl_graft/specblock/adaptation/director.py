"""What rank 0 decides: when the learner works on what, which weights serve, and when they go again.

One thing happens at a time: an update is under way, or its weights are on trial, or neither. Nothing here
waits, and nothing knows about engines.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor

from .bandit import FULL, Choice, CostAwareBandit
from .child import pack
from .collect import Heads, Segment
from .evidence import EvidenceBuffer
from .guard import AcceptGuard, Verdict
from .learner import Update
from .weights import WeightArea

LEAST_GAIN = 0.002  # of a verify's tokens, on held rows; less is noise
MOST_STARTS = 4  # of the learner's process; then learning ends
REMEMBERED = 256  # actions kept for the status

logger = logging.getLogger(__name__)


class LearnerLink(Protocol):
    """`process.LearnerProcess`, or what stands for it in a test."""

    area: WeightArea

    @property
    def alive(self) -> bool: ...
    def send(self, header: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> bool: ...
    def answer(self) -> tuple[Update, str | None] | None: ...
    def close(self) -> None: ...


class Director:
    """
    Args:
        start_learner: makes a link whose learner has the weights that serve.
        served: the weights that serve; kept up to date here.
        shipped: the weights of the checkpoint.
        update_rows: rows that one update learns from.
        save: what a save names besides weights and version (``folder``, ``base``), or None to keep nothing.

    Attributes:
        version: number of the weights that serve; 0 are the shipped ones, and no number is given twice.
        paused: nothing new is learned or taken over.
    """

    def __init__(
        self,
        start_learner: Callable[[], LearnerLink],
        served: WeightArea,
        shipped: Tensor,
        bandit: CostAwareBandit,
        capacity: int,
        update_rows: int,
        save: dict[str, Any] | None = None,
    ) -> None:
        self.served, self.bandit, self.update_rows = served, bandit, update_rows
        self.segments: EvidenceBuffer[Segment] = EvidenceBuffer(capacity)
        self.heads: EvidenceBuffer[Heads] = EvidenceBuffer(capacity)
        self.guard = AcceptGuard()
        self.version = 0
        self.paused = False
        self.counts = {"head": 0, "full": 0, "skip": 0, "refused": 0, "rolled_back": 0, "crashed": 0}
        self.actions: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        self._start_learner, self._save = start_learner, save
        self._shipped = shipped
        self._newest = 0
        self._before: tuple[int, Tensor] | None = None  # the weights before the last change
        self._learner: LearnerLink | None = None
        self._starts = 0
        self._unsaved = False
        self._working: Choice | None = None
        self._trial: tuple[Choice, Update] | None = None

    # ---- what the outside asks for ---------------------------------------------------------------------

    def roll_back(self, version: int | None) -> None:
        """Go back to the weights before the last change (None) or to 0, the shipped ones.

        Raises:
            ValueError: there are no such weights any more.
        """
        kept = {0: self._shipped} | ({self._before[0]: self._before[1]} if self._before else {})
        kept.pop(self.version, None)
        if version is None:
            version = max(kept, default=None)
        if version is None or version not in kept:
            raise ValueError(
                f"weights {self.version} serve and there is no version {version} to go back to; kept are: "
                f"{', '.join(map(str, sorted(kept))) or 'none'}"
            )
        if self._trial is not None:
            self.bandit.rolled_back(self._trial[0].domain, self._trial[0].arm)
            self._trial = None
        self._working = None  # its answer would build on the weights that go
        self._drop_learner()
        self._starts = 0
        self._go_back(version, kept[version])
        self._unsaved = True

    def restore(self, flat: Tensor, version: int, bandit: dict[str, Any]) -> None:
        """Continue from saved weights. Raises KeyError, TypeError or ValueError for a damaged `bandit`."""
        self.bandit.restore(bandit)
        self.served.flat.copy_(flat)
        self.version = self._newest = version

    def close(self) -> None:
        """End the learner."""
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    @property
    def state(self) -> str:
        if self.paused:
            return "paused"
        if self._starts >= MOST_STARTS and self._learner is None:
            return "given up"
        if self._trial is not None:
            return "trial"
        return "learning" if self._working is not None else "watching"

    def status(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "state": self.state,
            "counts": dict(self.counts),
            "rows": {"segments": self.segments.rows, "heads": self.heads.rows},
            "domains": {
                name: {"tokens": record.tokens, "arms": {a: asdict(r) for a, r in record.arms.items()}}
                for name, record in self.bandit.domains.items()
            },
            "actions": list(self.actions),
        }

    # ---- a decision ------------------------------------------------------------------------------------

    def decide(self) -> bool:
        """Look at everything once; True when `served` holds other weights now, under another version."""
        if self._trial is not None:
            return self._judge_trial()
        self._look_after_learner()
        if self._working is not None:
            return self._take_answer()
        if not self.paused:
            self._begin()
        return False

    def _begin(self) -> None:
        if self._starts >= MOST_STARTS and self._learner is None:
            return
        if self._unsaved and self._save is not None:
            self._save_served()
            return
        choice = self.bandit.choose()
        if choice is None:
            self.counts["skip"] += self.bandit.ready
            return
        evidence: EvidenceBuffer[Any] = self.segments if choice.arm == FULL else self.heads
        learn = evidence.learnable(choice.domain, self.update_rows)
        held = evidence.held(self.update_rows // 2)
        if not learn or not held:
            return
        job = {"job": "update", "arm": choice.arm}
        learner = self._learner_running()
        if learner is not None and learner.send(
            job, pack(choice.arm, "learn", learn) | pack(choice.arm, "held", held)
        ):
            self.counts[choice.arm] += 1
            self.bandit.began(choice)
            self._working = choice

    def _take_answer(self) -> bool:
        assert self._learner is not None and self._working is not None
        found = self._learner.answer()
        if found is None:
            return False
        choice, (update, problem) = self._working, found
        self._working = None
        # NaN compares as false.
        useful = problem is None and update.gain >= LEAST_GAIN and not self.paused
        self.bandit.learned(choice.domain, choice.arm, update.gain if useful else 0.0, update.seconds)
        self._note(choice, update, "served" if useful else problem or "no gain")
        if not useful:
            self.counts["refused"] += problem is not None
            if problem is None:
                self._learner.send({"job": "undo"})
            else:
                self._reset_learner()
            return False
        self._change(self._learner.area.flat)
        if choice.arm == FULL:
            self.heads.clear()  # hidden states of another trunk
        self._trial = (choice, update)
        self.guard.swapped()
        return True

    def _judge_trial(self) -> bool:
        assert self._trial is not None
        verdict = self.guard.verdict()
        if verdict in (Verdict.TRIAL, Verdict.NONE):
            return False
        choice, update = self._trial
        self._trial = None
        if verdict is Verdict.KEEP:
            self.guard.kept()
            self._unsaved = True
            return False
        assert self._before is not None
        self.bandit.rolled_back(choice.domain, choice.arm)
        self._note(choice, update, "rolled back")
        logger.warning("SPECBLOCK takes back weights %d, which made accepts shorter", self.version)
        self._go_back(*self._before)
        return True

    # ---- inside ----------------------------------------------------------------------------------------

    def _change(self, flat: Tensor) -> None:
        self._before = self.version, self.served.flat.clone()
        self.served.flat.copy_(flat)
        self._newest += 1
        self.version = self._newest

    def _go_back(self, version: int, flat: Tensor) -> None:
        self.served.flat.copy_(flat)
        self.heads.clear()
        self._before = None
        self.version = version
        self.counts["rolled_back"] += 1
        self.guard.undone()
        self._reset_learner()

    def _reset_learner(self) -> None:
        """Its copy becomes the one that serves."""
        weights = {"weights": self.served.flat.clone()}
        if self._learner is not None and not self._learner.send({"job": "reset"}, weights):
            self._drop_learner()

    def _drop_learner(self) -> None:
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    def _look_after_learner(self) -> None:
        """A learner that died is forgotten; the next update starts another, a few times."""
        if self._learner is None or self._learner.alive:
            return
        self.counts["crashed"] += 1
        if self._working is not None:
            self.bandit.rolled_back(self._working.domain, self._working.arm)
        self._working, self._learner = None, None
        logger.warning(
            "SPECBLOCK's learner died (start %d of %d); serving goes on", self._starts, MOST_STARTS
        )

    def _save_served(self) -> None:
        """Have the learner write the weights that serve; it is the one who may be slow."""
        if self._save is None:
            return
        job = {"job": "save", "version": self.version, "bandit": self.bandit.state(), **self._save}
        learner = self._learner_running()
        if learner is not None and learner.send(job, {"weights": self.served.flat.clone()}):
            self._unsaved = False

    def _learner_running(self) -> LearnerLink | None:
        """The learner, started where there is none; None where the machine does not let it start."""
        if self._learner is None:
            self._starts += 1
            try:
                self._learner = self._start_learner()
            except OSError as error:  # no process, memory or file handle left
                self.counts["crashed"] += 1
                logger.warning(
                    "SPECBLOCK's learner did not start (start %d of %d); serving goes on: %s",
                    self._starts,
                    MOST_STARTS,
                    error,
                )
        return self._learner

    def _note(self, choice: Choice, update: Update, outcome: str) -> None:
        self.actions.append(
            {
                "tokens": round(self.bandit.tokens),
                "domain": choice.domain,
                "arm": choice.arm,
                "explores": choice.explores,
                "gain": round(update.gain, 4) if update.gain == update.gain else None,
                "seconds": round(update.seconds, 3),
                "outcome": outcome,
                "version": self.version,
            }
        )
