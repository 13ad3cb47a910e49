"""Random interleavings of requests, and a model of what a client may see of them. No engine, no torch.

A :class:`Scenario` says which requests arrive when; aborts are decided while it runs, since they aim at the
state a request is in. :class:`Model` is told what was asked for and what came back, and names every answer
that plain decoding would not have given.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any, TypedDict

TEXT = "\n".join(topics[name] for name in sorted(topics)).encode()
STATES = ("grammar", "queued", "prefill", "decoding", "retracted")
REGEX = r"(the|this) (object|statement) (is|was) [a-z]{4,12}\."
PREFIXES = tuple(TEXT[5000 * i : 5000 * i + 40 + 30 * i] for i in range(4))
EOS = 257  # as in tests/serving/markov.py
NO_EOS = {"logit_bias": {str(EOS): -100.0}}

# name -> sampling parameters, and whether the request asks for log-probabilities or thinks first
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "filtered": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "grammar": {"temperature": 0.0, "regex": REGEX},
    "sampled grammar": {"temperature": 1.0, "regex": REGEX},
    "thinks": {"temperature": 0.0, "regex": REGEX, "think": True},
    "thinks, sampled": {"temperature": 1.0, "regex": REGEX, "think": True},
    "logprobs": {"temperature": 0.0, "logprobs": True},
    "stop string": {"temperature": 0.0, "stop": ["e t", "in "]},
    "stop id": {"temperature": 1.0, "stop_token_ids": [ord("o")]},
    "ends": {"temperature": 1.0, "logit_bias": {str(EOS): 9.0}},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "long": {"temperature": 0.0, **NO_EOS},
    "long, seeded": {"temperature": 1.0, **NO_EOS},
}


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes:
        rid: its id, of no other request.
        key: what its answer depends on; equal keys have equal answers.
        at: step before which it arrives.
    """

    rid: str
    kind: str
    prompt: bytes
    tokens: int
    seed: int
    at: int

    @property
    def key(self) -> str:
        return f"{self.kind}|{self.prompt.hex()}|{self.tokens}|{self.seed}"


@dataclass(frozen=True)
class Scenario:
    """Arrivals in waves, between which the batch may run empty."""

    seed: int
    jobs: tuple[Job, ...]
    abort_chance: float  # of one request being aborted before a step

    @classmethod
    def draw(cls, seed: int, num_jobs: int = 14) -> Scenario:
        rng = random.Random(seed)
        jobs, at = [], 0
        while len(jobs) < num_jobs:
            for _ in range(rng.choice((1, 2, 3, 5, 8))):
                kind = rng.choice(tuple(KINDS))
                suffix = TEXT[(start := rng.randrange(40_000)) : start + rng.choice((0, 1, 7, 25))]
                tokens = rng.choice((80, 160)) if kind.startswith("long") else rng.choice((1, 2, 9, 24, 40))
                tokens = 44 if "grammar" in kind or "think" in kind else tokens
                prompt = rng.choice(PREFIXES) + suffix
                again = rng.random() < 0.3 and jobs  # a retry, perhaps of a request that was aborted
                job = Job(f"{seed}-{len(jobs)}", kind, prompt, tokens, rng.randrange(4), at)
                if again:
                    former = rng.choice(jobs)
                    job = Job(job.rid, former.kind, former.prompt, former.tokens, former.seed, at)
                jobs.append(job)
            at += rng.choice((0, 1, 3, 8, 40, 400))
        return cls(seed, tuple(jobs[:num_jobs]), rng.choice((0.0, 0.02, 0.08)))


class Extras(TypedDict):
    """What comes with the end of an answer."""

    logprobs: list[Any]
    reasoning: int


@dataclass
class _Open:
    job: Job
    sent: list[int] = field(default_factory=list)
    abort_asked: bool = False


class Model:
    """What a client may see.

    Args:
        answers: by job key, plain decoding's tokens, finish, logprobs and reasoning.
        most_running: requests that may run at once.
    """

    def __init__(self, answers: dict[str, dict[str, Any]], most_running: int) -> None:
        self._answers = answers
        self._most_running = most_running
        self._open: dict[str, _Open] = {}
        self.finished = self.aborted = 0
        self.mistakes: list[str] = []

    @property
    def idle(self) -> bool:
        return not self._open

    @property
    def open(self) -> list[str]:
        return list(self._open)

    def submit(self, job: Job) -> None:
        self._open[job.rid] = _Open(job)

    def abort(self, rid: str) -> None:
        self._open[rid].abort_asked = True

    def flushed(self, success: bool) -> None:
        """The caches may be dropped exactly when nobody runs or waits."""
        if success != self.idle:
            self.mistakes.append(f"flush said {success} with {len(self._open)} requests open")

    def ran(self, rids: list[str]) -> None:
        """The batch of one step."""
        if len(set(rids)) != len(rids):
            self.mistakes.append(f"a request is twice in one batch: {rids}")
        if len(rids) > self._most_running:
            self.mistakes.append(f"{len(rids)} requests in a batch of at most {self._most_running}")
        strangers = [rid for rid in rids if rid not in self._open]
        if strangers:
            self.mistakes.append(f"ran without having been asked for, or after their end: {strangers}")

    def received(self, rid: str, tokens: list[int], finish: dict[str, Any] | None, more: Extras) -> None:
        """A chunk of an answer: new tokens, and how it ended."""
        request = self._open.get(rid)
        if request is None:
            self.mistakes.append(f"{rid}: a chunk for a request that is over or unknown")
            return
        expected = self._answers[request.job.key]
        request.sent += tokens
        name = f"{rid} ({request.job.kind})"
        if request.sent != expected["tokens"][: len(request.sent)]:
            self.mistakes.append(f"{name}: {request.sent} is not plain decoding's {expected['tokens']}")
        if finish is None:
            return
        del self._open[rid]
        if finish["type"] == "abort":
            self.aborted += 1
            if not request.abort_asked:
                self.mistakes.append(f"{name}: aborted, and nobody asked for it: {finish}")
            return
        self.finished += 1
        if request.sent != expected["tokens"] or finish != expected["finish"]:
            self.mistakes.append(f"{name}: ended with {finish} after {len(request.sent)} tokens")
        if not _close(more["logprobs"], expected["logprobs"]):
            self.mistakes.append(f"{name}: other log-probabilities: {more['logprobs']}")
        if more["reasoning"] != expected["reasoning"] or more["reasoning"] > len(request.sent):
            self.mistakes.append(
                f"{name}: {more['reasoning']} reasoning tokens of {len(request.sent)}, not "
                f"{expected['reasoning']}"
            )


def _close(got: list[Any], wanted: list[Any]) -> bool:
    """Pairs of log-probability and token, in order."""
    return len(got) == len(wanted) and all(
        token == known and abs(value - expected) < 1e-3
        for (value, token), (expected, known) in zip(got, wanted, strict=True)
    )
