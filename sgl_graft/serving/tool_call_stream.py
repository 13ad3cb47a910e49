"""Hands streamed text to SGLang's tool-call parsers in the pieces that they were written for.

Their streaming side assumes about one token at a time: text in front of a call that arrives together with the
call's opening marker is dropped. A speculative round brings several tokens, so such text is common.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any


def parse_in_pieces(
    original: Callable[[Any, str], tuple[str, list[Any]]], parser: Any, chunk_text: str
) -> tuple[str, list[Any]]:
    """Around ``FunctionCallParser.parse_stream_chunk``: one call of it for every piece, results joined."""
    text, calls = "", []
    for piece in pieces(chunk_text, marker_starts(parser.detector)):
        more_text, more_calls = original(parser, piece)
        text += more_text
        calls += more_calls
    return text, calls


def marker_starts(detector: Any) -> frozenset[str]:
    """First characters of the markers around calls, as far as the detector names them."""
    markers = (getattr(detector, name, "") for name in ("bot_token", "eot_token"))
    return frozenset({"<", *(marker[0] for marker in markers if isinstance(marker, str) and marker)})


def pieces(text: str, starts: frozenset[str]) -> list[str]:
    """``text`` cut in front of every character that could begin a marker; an empty text is one piece."""
    cuts = [0, *(at for at in range(1, len(text)) if text[at] in starts), len(text)]
    return [text[left:right] for left, right in itertools.pairwise(cuts)]
