"""Reasoning and tool-call parsers through the official client, streamed and whole, under every algorithm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from . import scripted
from .conftest import READY_TIMEOUT_S, ROOMY
from .server import Server, Start
from .variants import PLAIN, SPECULATIVE

pytestmark = pytest.mark.soak  # a server each; `make test` has GRAFT's in test_keys.py


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return scripted.build(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module", params=[PLAIN, *SPECULATIVE], ids=lambda variant: variant.name)
def parsing(
    request: pytest.FixtureRequest, start_server: Start, folders: dict[str, Path]
) -> Iterator[tuple[Server, bool]]:
    """A server of the scripted target, and whether it speculates."""
    variant = request.param
    args = (*ROOMY, *scripted.arguments(variant, folders))
    server = start_server(f"parsers-{variant.name}", folders["target"], *args, OMP_NUM_THREADS="1")
    server.process.wait_ready(READY_TIMEOUT_S)
    yield server, variant is not PLAIN
    server.stop()


def ask(url: str, key: str = "none", **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=120, max_retries=0)
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools: Any = scripted.TOOLS
    return client.chat.completions.create(
        model="default", messages=messages, tools=tools, max_tokens=60, temperature=0, **options
    )


def check_whole(url: str, key: str = "none") -> None:
    choice = ask(url, key).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.message.reasoning_content == scripted.REASONING
    assert choice.message.content == scripted.CONTENT
    assert call.function.name == "weather" and json.loads(call.function.arguments) == scripted.ARGUMENTS
    assert choice.finish_reason == "tool_calls"


def check_streamed(url: str, key: str = "none") -> list[Any]:
    """Every piece arrives in its own field, once and in order; returns the chunks."""
    chunks = list(ask(url, key, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    content = [delta.content or "" for delta in deltas]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert "".join(reasoning) == scripted.REASONING
    assert "".join(content) == scripted.CONTENT
    assert [call.function.name for call in calls if call.function.name] == ["weather"]
    assert {call.index for call in calls} == {0}
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == scripted.ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    last_reasoning = max(index for index, text in enumerate(reasoning) if text)
    first_content = min(index for index, text in enumerate(content) if text)
    assert last_reasoning <= first_content
    return chunks


def test_whole_answers(parsing: tuple[Server, bool]) -> None:
    check_whole(parsing[0].url)


def test_streamed_answers(parsing: tuple[Server, bool]) -> None:
    server, speculates = parsing
    chunks = check_streamed(server.url)
    plain = len(scripted.SCRIPT) + 3  # role, finish reason
    assert len(chunks) < plain
    accepted = server.info()["internal_states"][0].get("avg_spec_accept_length")
    assert not speculates or accepted is None or accepted > 1.2


def test_an_answer_says_what_its_speculation_did(parsing: tuple[Server, bool]) -> None:
    server, speculates = parsing
    answer = ask(server.url, extra_body={"return_spec_tokens_details": True}).model_dump()
    details = (answer.get("sglext") or {}).get("spec_tokens_details")
    assert (details is not None) == speculates
    if speculates:
        assert details["spec_verify_ct"] > 0
        assert 0 < details["spec_num_correct_drafts"] <= details["spec_num_proposed_drafts"]
