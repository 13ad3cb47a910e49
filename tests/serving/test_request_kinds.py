"""Every kind of request that a server takes, answered as without speculation."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from . import markov
from .mixed_load import wait_until_empty
from .payloads import FILTERS, PROMPTS, check, check_all, endless, outcome, request, seeded
from .server import Reference, Server

LOGPROB_TOLERANCE = 1e-4
MOST_RESERVED = 20  # by any variant: the larger of its slots and topk * steps
GRAMMARS = {
    "json_schema": json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{3,9}$"},
                "size": {"type": "integer", "minimum": 1, "maximum": 99},
                "kind": {"enum": ["list", "tuple", "dictionary"]},
            },
            "required": ["name", "size", "kind"],
            "additionalProperties": False,
        }
    ),
    "regex": r"(the|this) (object|statement) (is|was) [a-z]{4,12}\.",
    "ebnf": 'root ::= item ", " item\nitem ::= "a " word\nword ::= [a-z] [a-z] [a-z] [a-z]',
}


# ---- where an answer ends -------------------------------------------------------------------------------


def test_max_tokens_at_every_place_of_a_run(speculative: Server, reference: Reference) -> None:
    answers = check_all(speculative, reference, [request(tokens=n) for n in range(1, 15)])
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == list(range(1, 15))


def test_stop_strings_at_every_place_of_a_run(speculative: Server, reference: Reference) -> None:
    text = reference(request(tokens=40))["text"]
    payloads = [request(tokens=40, stop=[text[at : at + 3]]) for at in range(2, 24, 2)]
    answers = check_all(speculative, reference, payloads)
    assert all(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in answers)


def test_stop_strings_longer_than_a_run_or_kept(speculative: Server, reference: Reference) -> None:
    text = reference(request(tokens=40))["text"]
    check(speculative, reference, request(tokens=40, stop=[text[5:20]]))
    kept = check(speculative, reference, request(tokens=40, stop=[text[9:12]], no_stop_trim=True))
    assert text[9:12] in kept["text"]


def test_stop_ids(speculative: Server, reference: Reference) -> None:
    ids = reference(request(tokens=40))["output_ids"]
    payloads = [request(tokens=40, stop_token_ids=[token]) for token in dict.fromkeys(ids[3:])]
    answers = check_all(speculative, reference, payloads)
    for answer, payload in zip(answers, payloads, strict=True):
        (stop,) = payload["sampling_params"]["stop_token_ids"]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_end_of_sequence(speculative: Server, reference: Reference) -> None:
    likelier = {"logit_bias": {str(markov.EOS): 9.0}}
    payloads = [request(prompt, 60, **likelier) for prompt in PROMPTS]
    payloads += [seeded(prompt, seed, 60, **likelier) for seed, prompt in enumerate(PROMPTS)]
    answers = check_all(speculative, reference, payloads)
    ends = [answer["meta_info"]["finish_reason"].get("matched") for answer in answers]
    assert ends.count(markov.EOS) >= 4
    check(speculative, reference, request(tokens=60, ignore_eos=True, **likelier))


def test_the_last_positions_of_the_context(speculative: Server, reference: Reference) -> None:
    """SGLang keeps one tree's slots of the context free, so that no draft lies beyond the last position."""
    text = "".join(PROMPTS) * 40
    lengths = range(markov.POSITIONS - 48, markov.POSITIONS - 40, 2)
    usable = markov.POSITIONS - MOST_RESERVED - 1
    payloads = [request(text[:length], tokens=usable - length, ignore_eos=True) for length in lengths]
    check_all(speculative, reference, payloads, concurrency=1)
    to_the_end = request(text[: lengths[0]], ignore_eos=True)
    del to_the_end["sampling_params"]["max_new_tokens"]
    answer, expected = speculative.generate(to_the_end), reference(to_the_end)
    written = answer["meta_info"]["completion_tokens"]
    assert usable - 1 <= lengths[0] + written <= markov.POSITIONS
    assert answer["output_ids"] == expected["output_ids"][:written]


# ---- log-probabilities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [request(), seeded(temperature=0.7)], ids=["greedy", "seeded"])
def test_logprobs(speculative: Server, reference: Reference, payload: dict[str, Any]) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [10, 101, 116]}
    payload = payload | asked | {"logprob_start_len": 4}
    answer, expected = check(speculative, reference, payload)["meta_info"], reference(payload)["meta_info"]
    assert len(answer["output_token_logprobs"]) == answer["completion_tokens"]
    for name in ("output_token_logprobs", "input_token_logprobs"):
        assert_close(answer[name], expected[name])
    for name in ("output_top_logprobs", "output_token_ids_logprobs", "input_top_logprobs"):
        assert len(answer[name]) == len(expected[name])
        for position, wanted in zip(answer[name], expected[name], strict=True):
            assert_close(position or [], wanted or [])


def test_logprobs_stop_where_the_answer_stops(speculative: Server, reference: Reference) -> None:
    text = reference(request(tokens=40))["text"]
    payloads = [
        request(tokens=40, stop=[text[at : at + 2]]) | {"return_logprob": True} for at in range(3, 12)
    ]
    for answer in check_all(speculative, reference, payloads):
        ids = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
        assert ids == answer["output_ids"]


def assert_close(got: list[Any], wanted: list[Any]) -> None:
    assert [entry[1] for entry in got] == [entry[1] for entry in wanted]
    for entry, expected in zip(got, wanted, strict=True):
        assert entry[0] == pytest.approx(expected[0], abs=LOGPROB_TOLERANCE)


# ---- changed logits -------------------------------------------------------------------------------------

PENALTIES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.3},
    "negative": {"frequency_penalty": -0.5, "presence_penalty": 0.5},
    "min_new_tokens": {"min_new_tokens": 20, "logit_bias": {str(markov.EOS): 30.0}},
    "all": {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_new_tokens": 8,
        "logit_bias": {str(markov.EOS): 20.0},
    },
}


@pytest.mark.parametrize("penalties", PENALTIES.values(), ids=PENALTIES)
def test_penalties(speculative: Server, reference: Reference, penalties: dict[str, Any]) -> None:
    greedy = check(speculative, reference, request(**penalties))
    assert outcome(greedy) != outcome(reference(request()))
    check(speculative, reference, seeded(**penalties))


def test_penalised_requests_in_a_mixed_batch(speculative: Server, reference: Reference) -> None:
    payloads = [request(PROMPTS[i], 30, **p) for i, p in enumerate(PENALTIES.values())]
    payloads += [request(prompt, 30) for prompt in PROMPTS]
    answers = check_all(speculative, reference, payloads)
    # A penalised request commits one token a round; its neighbours go on committing several.
    verifies = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
    assert verifies[0] == answers[0]["meta_info"]["completion_tokens"] - 1
    assert min(verifies[len(PENALTIES) :]) < 25


def test_logit_bias(speculative: Server, reference: Reference) -> None:
    spaces = check(speculative, reference, request(logit_bias={"32": 3.0, "101": -4.0}))
    assert outcome(spaces) != outcome(reference(request()))
    check(speculative, reference, seeded(logit_bias={"32": -100.0}, **FILTERS["all"]))


# ---- grammars -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GRAMMARS)
def test_grammars(speculative: Server, reference: Reference, kind: str) -> None:
    # Without the bias the tiny target would rather write white space than JSON.
    constrained = {kind: GRAMMARS[kind], "logit_bias": {"10": -30.0, "32": -15.0}}
    payloads = [request(tokens=100, **constrained)]
    payloads += [seeded(seed=seed, tokens=100, **constrained) for seed in range(3)]
    payloads += [request(prompt) for prompt in PROMPTS[:3]]
    answers = check_all(speculative, reference, payloads)
    for answer in answers[:4]:
        assert_valid(kind, answer["text"])


def test_grammar_with_logprobs_and_penalties(speculative: Server, reference: Reference) -> None:
    regex = {"regex": GRAMMARS["regex"]}
    logprobs = check(speculative, reference, request(**regex) | {"return_logprob": True})
    meta = logprobs["meta_info"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    check(speculative, reference, request(repetition_penalty=1.5, **regex))


def assert_valid(kind: str, text: str) -> None:
    if kind == "json_schema":
        assert json.loads(text).keys() == {"name", "size", "kind"}
    elif kind == "regex":
        assert re.fullmatch(GRAMMARS["regex"], text)
    else:
        assert re.fullmatch("a [a-z]{4}, a [a-z]{4}", text)


# ---- several answers, several prompts -------------------------------------------------------------------


def test_several_samples_of_one_prompt(speculative: Server, reference: Reference) -> None:
    greedy = check(speculative, reference, request(n=3))
    assert len({answer["text"] for answer in greedy}) == 1
    unseeded = speculative.generate(request(n=4, temperature=1.0))
    assert len({answer["text"] for answer in unseeded}) == 4


def test_several_samples_with_a_seed_differ_and_are_reproducible(
    speculative: Server, reference: Reference
) -> None:
    samples = check(speculative, reference, seeded(n=4))
    assert len({answer["text"] for answer in samples}) == 4
    # The first sample is the one that the seed alone gives.
    assert outcome(samples[0]) == outcome(reference(seeded()))


def test_list_of_prompts_with_their_own_sampling(speculative: Server, reference: Reference) -> None:
    sampling = [seeded(seed=i, tokens=10 + 5 * i, **f) for i, f in enumerate(FILTERS.values())]
    sampling[1] = request(tokens=33)
    together = {"text": list(PROMPTS), "sampling_params": [each["sampling_params"] for each in sampling]}
    answers = check(speculative, reference, together)
    for answer, prompt, each in zip(answers, PROMPTS, sampling, strict=True):
        assert outcome(answer) == outcome(reference(each | {"text": prompt}))


# ---- streaming and aborting -----------------------------------------------------------------------------


def test_streaming(speculative: Server, reference: Reference) -> None:
    text = reference(request(tokens=60))["text"]
    for payload in (request(tokens=60), seeded(tokens=60), request(tokens=60, stop=[text[30:34]])):
        chunks = list(speculative.stream(payload))
        counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert len(set(counts)) > 5
        assert all(chunks[-1]["text"].startswith(chunk["text"].rstrip("\ufffd")) for chunk in chunks)
        assert outcome(chunks[-1]) == outcome(reference(payload))


def test_a_dropped_connection_frees_its_request(speculative: Server, reference: Reference) -> None:
    streams = [speculative.stream(endless(prompt)) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
        next(stream)
    assert speculative.tokens_in_use() > 0
    for stream in streams:
        stream.close()
    wait_until_empty(speculative)
    check(speculative, reference, request())


def test_abort_by_id(speculative: Server, reference: Reference) -> None:
    stream = speculative.stream(endless() | {"rid": "to be aborted"})
    first = next(stream)
    assert speculative.client.post("/abort_request", json={"rid": "to be aborted"}).status_code == 200
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert first["meta_info"]["completion_tokens"] < last["meta_info"]["completion_tokens"] < 1500
    wait_until_empty(speculative)


def test_a_sampling_mask_is_refused(speculative: Server, reference: Reference) -> None:
    asked = seeded(top_k=8) | {"return_sampling_mask": True}
    several = asked | {"text": list(PROMPTS[:2])}
    for server in (speculative, reference.server):
        for payload in (asked, several):
            answer = server.client.post("/generate", json=payload)
            assert answer.status_code == 400
            assert "top_logprobs_num gives" in answer.text
    check(speculative, reference, request())


# ---- prefill --------------------------------------------------------------------------------------------


def test_prompts_longer_than_a_prefill_chunk(speculative: Server, reference: Reference) -> None:
    long = "".join(PROMPTS) * 3
    check_all(speculative, reference, [request(f"{i}{long}") for i in range(4)])
    assert re.search(r"Prefill batch.*#new-token: 64,", speculative.log_text())


def test_cached_prefixes(speculative: Server, reference: Reference) -> None:
    prefix = "Cached prefix. " + "".join(PROMPTS)
    first = check(speculative, reference, request(prefix, tokens=24))
    again = check(speculative, reference, request(prefix, tokens=24))
    assert again["meta_info"]["cached_tokens"] >= len(prefix) - 2
    # The answer itself is cached too: its KV must be that of the accepted path.
    longer = request(prefix + first["text"] + " and", tokens=24)
    continued = check(speculative, reference, longer)
    assert continued["meta_info"]["cached_tokens"] >= len(prefix) + 20
    forks = [request(prefix + prompt, tokens=24) for prompt in PROMPTS]
    check_all(speculative, reference, forks)
