"""A reproducible mixture of every kind of request, some of them dropped by their client."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

from . import markov
from .payloads import FILTERS, PROMPTS, assert_same, endless, request, seeded
from .server import Payload, Reference, Server

SHARE_ABORTED = 0.1
PART = 50  # jobs of a long load between two looks at the server
SAMPLED = list(FILTERS.values())
LONG_TEXT = "\n".join(topics[name] for name in sorted(topics))


@dataclass(frozen=True)
class Job:
    """One request, and after how many streamed chunks its client goes away."""

    payload: Payload
    streamed: bool
    aborts_after: int | None


def _long_prompt(pick: random.Random) -> str:
    start = pick.randrange(100_000)
    return LONG_TEXT[start : start + pick.randrange(300, 600)]


KINDS: tuple[Callable[[random.Random, str, int], Payload], ...] = (
    lambda pick, text, tokens: request(text, tokens),
    lambda pick, text, tokens: request(_long_prompt(pick), tokens + 60),
    lambda pick, text, tokens: seeded(
        text, pick.randrange(10**6), tokens, **pick.choice([*FILTERS.values()])
    ),
    lambda pick, text, tokens: request(text, tokens, stop=[" t", "\n\n"]),
    lambda pick, text, tokens: request(text, tokens, stop_token_ids=[ord("."), ord("x")]),
    lambda pick, text, tokens: request(text, tokens, logit_bias={str(markov.EOS): 8.0}),
    lambda pick, text, tokens: request(text, tokens) | {"return_logprob": True, "top_logprobs_num": 2},
    lambda pick, text, tokens: request(text, tokens, frequency_penalty=0.7, presence_penalty=0.2),
    lambda pick, text, tokens: request(text, tokens, repetition_penalty=1.2, min_new_tokens=5),
    lambda pick, text, tokens: request(text, tokens, regex=r"[a-z]{3,8}( [a-z]{2,6}){2,4}\."),
    lambda pick, text, tokens: request(text, tokens, ebnf='root ::= ("yes" | "no") " " [a-z]+ "."'),
    lambda pick, text, tokens: seeded(text, pick.randrange(10**6), tokens, n=2),
    lambda pick, text, tokens: {
        "text": [text, *PROMPTS[:2]],
        "sampling_params": [request(tokens=tokens + i)["sampling_params"] for i in range(3)],
    },
)


def jobs(count: int, seed: int = 0, crowd: int = 0) -> list[Job]:
    """``count`` jobs that go through all kinds in turn.

    Of every ``PART`` jobs the first ``crowd`` have answers so long that eight of them fill a tight pool.
    """
    pick = random.Random(seed)
    made = []
    for index in range(count):
        if index % PART < crowd:
            payload = endless(f"{index}: {pick.choice(PROMPTS)}", tokens=pick.randrange(600, 700))
        else:
            payload = KINDS[index % len(KINDS)](pick, pick.choice(PROMPTS), pick.randrange(10, 60))
        single = isinstance(payload["text"], str) and payload["sampling_params"].get("n", 1) == 1
        aborts_after = pick.randrange(1, 6) if single and pick.random() < SHARE_ABORTED * 1.25 else None
        made.append(Job(payload, single and pick.random() < 0.5, aborts_after))
    return made


def drive(server: Server, work: list[Job], concurrency: int) -> list[Any]:
    """Answers in order, None for an aborted job."""

    def one(job: Job) -> Any:
        if job.aborts_after is None and not job.streamed:
            return server.generate(job.payload)
        stream = server.stream(job.payload)
        answer = None
        for count, chunk in enumerate(stream, start=1):
            answer = chunk
            if count == job.aborts_after:
                stream.close()
                return None
        return answer if job.aborts_after is None else None

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, work))


def check_load(server: Server, reference: Reference, work: list[Job], concurrency: int = 8) -> None:
    """Drive the jobs; every answer must be that of the request alone, and nothing may be left behind."""
    answers = drive(server, work, concurrency)
    for job, answer in zip(work, answers, strict=True):
        if answer is not None:
            assert_same(answer, reference(job.payload))
    assert server.poll() is None
    wait_until_empty(server)


def wait_until_empty(server: Server, seconds: float = 30.0) -> None:
    """Wait until no request holds KV slots, then drop the radix cache and find the whole pool free."""
    deadline = time.monotonic() + seconds
    while server.tokens_in_use() > 0:
        assert time.monotonic() < deadline, f"{server.tokens_in_use()} KV slots still held"
        time.sleep(0.1)
    server.flush()
