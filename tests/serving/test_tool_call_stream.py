"""Streamed tool calls lose nothing, however an answer is cut into chunks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from sgl_graft.serving.tool_call_stream import parse_in_pieces, pieces

TOOLS = [
    Tool.model_validate(
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    )
    for name in ("weather", "time")
]
BEFORE = "Let me look: 3 < 4.\n"
CALL = {"name": "weather", "arguments": {"city": "Paris <here>\nor there"}}
ANSWERS = {
    "qwen25": f"{BEFORE}<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "hermes": f"{BEFORE}<tool_call>{json.dumps(CALL)}</tool_call>",
    "mistral": f"{BEFORE}[TOOL_CALLS] [{json.dumps(CALL)}]",
    "llama3": f"{BEFORE}<|python_tag|>{json.dumps(CALL)}",
}
ORIGINAL = FunctionCallParser.parse_stream_chunk


def stream(kind: str, chunks: list[str], ours: bool = True) -> tuple[str, str, str]:
    """Text, name and arguments as a client would join them."""
    parser = FunctionCallParser(TOOLS, kind)
    text, name, arguments = "", "", ""
    for chunk in chunks:
        part, calls = parse_in_pieces(ORIGINAL, parser, chunk) if ours else ORIGINAL(parser, chunk)
        text += part
        for call in calls:
            name += call.name or ""
            arguments += call.parameters or ""
    return text, name, arguments


@pytest.mark.parametrize("kind", ANSWERS)
@given(data=st.data())
def test_any_cut_gives_the_same_answer(kind: str, data: st.DataObject) -> None:
    answer = ANSWERS[kind]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=8)))
    chunks = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    text, name, arguments = stream(kind, chunks)
    assert text.strip() == BEFORE.strip()
    assert name == "weather"
    # What a parser still holds back at the end of a stream, the server sends afterwards.
    assert json.dumps(CALL["arguments"]).startswith(arguments)


@pytest.mark.parametrize("kind", ["qwen25", "hermes"])
def test_a_whole_call_in_one_chunk_keeps_its_arguments(kind: str) -> None:
    _, _, arguments = stream(kind, [ANSWERS[kind]])
    assert json.loads(arguments) == CALL["arguments"]


def test_without_us_text_is_lost() -> None:
    """The control: should upstream mend this, the hook can go."""
    assert stream("qwen25", [ANSWERS["qwen25"]], ours=False)[0].strip() != BEFORE.strip()


@given(st.text("ab<[\n"))
def test_pieces_are_the_text(text: str) -> None:
    cut = pieces(text, frozenset("<\n"))
    assert "".join(cut) == text
    assert all(not {"<", "\n"} & set(piece[1:]) for piece in cut)
