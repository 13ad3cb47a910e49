"""Request payloads and comparisons that several serving tests share."""

from __future__ import annotations

from typing import Any

from . import markov
from .server import Answer, Payload, Reference, Server

PROMPTS = (
    "The statement is executed when ",
    "A list of names:\n",
    "def f(x):\n    return ",
    "Note that the object is ",
    "If the file is opened",
    "Class definitions, like ",
)
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 8},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


def request(text: str = PROMPTS[0], tokens: int = 40, **sampling: Any) -> Payload:
    """A greedy request, unless ``sampling`` says otherwise."""
    return {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **sampling}}


def seeded(text: str = PROMPTS[0], seed: int = 1, tokens: int = 40, **sampling: Any) -> Payload:
    return request(text, tokens, **{"temperature": 1.0, "sampling_seed": seed, **sampling})


def endless(text: str = PROMPTS[0], tokens: int = 1500) -> Payload:
    """A long greedy request. Not by ``ignore_eos``: SGLang reserves the whole length of such a request."""
    return request(text, tokens, logit_bias={str(markov.EOS): -100.0})


def outcome(answer: Answer) -> tuple[list[int], str, Any]:
    """What must not depend on speculation."""
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


def assert_same(answer: Any, expected: Any) -> None:
    answers = answer if isinstance(answer, list) else [answer]
    wanted = expected if isinstance(expected, list) else [expected]
    assert [outcome(each) for each in answers] == [outcome(each) for each in wanted]


def check(server: Server, reference: Reference, payload: Payload) -> Any:
    """The server's answer, after finding it equal to plain decoding's."""
    answer = server.generate(payload)
    assert_same(answer, reference(payload))
    return answer


def check_all(
    server: Server, reference: Reference, payloads: list[Payload], concurrency: int = 8
) -> list[Any]:
    """Answers of requests sent together, each found equal to plain decoding's answer to it alone."""
    answers = server.generate_all(payloads, concurrency)
    for answer, payload in zip(answers, payloads, strict=True):
        assert_same(answer, reference(payload))
    return answers


def accept_length(answers: list[Answer]) -> float:
    """Tokens per verify, the prefill's token excluded."""
    tokens = sum(answer["meta_info"]["completion_tokens"] - 1 for answer in answers)
    return tokens / sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
