"""A tiny target that thinks, speaks and calls a tool, and drafts for it: what parsers have to take apart.

It says one script after every chat prompt. The tokens of the script cut the parsers' markers in two, and a
verify commits several of them at once.
"""

from __future__ import annotations

from pathlib import Path

from . import markov
from .variants import Variant

SCRIPT = (
    *("<th", "ink>I sh", "ould lo", "ok it", " up", ".</", "thi", "nk>One", " mo", "ment, ", "plea", "se."),
    *(
        "<too",
        'l_call>\n{"na',
        'me": "',
        "weath",
        'er", "argum',
        'ents": {"',
        'city": "Pa',
        'ris"}}',
        "\n</to",
    ),
    "ol_call>",
)
REASONING = "I should look it up."
CONTENT = "One moment, please."
ARGUMENTS = {"city": "Paris"}
PARSERS = ("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def build(folder: Path) -> dict[str, Path]:
    """Write the target and its drafts, by the names that `Variant.draft` has for them."""
    from tests.specblock import markov_draft  # transformers: seconds to import

    return {
        "target": markov.build_target(folder / "target", script=SCRIPT),
        "draft": markov.build_draft(folder / "draft", SCRIPT),
        "dflash": markov.build_dflash(folder / "dflash", SCRIPT),
        "specblock": markov_draft.build_draft(folder / "specblock", len(SCRIPT)),
    }


def arguments(variant: Variant, folders: dict[str, Path]) -> list[str]:
    """Of a server of the target with both parsers."""
    return [*variant.args(str(folders[variant.draft])), *PARSERS]
