"""A prompt of 32 K tokens on the tiny target: GRAFT serves it, and answers what plain decoding does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from .conftest import READY_TIMEOUT_S
from .payloads import accept_length
from .server import Start
from .variants import PLAIN, Variant

PROMPT_LEN = 32 * 1024
POSITIONS = PROMPT_LEN + 512
ANSWER_LEN = 64
GRAFT = Variant("graft", "GRAFT", (5, 4, 16))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def stretched(folder: Path, to: Path) -> Path:
    """The same checkpoint with room for more positions."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    return to


def test_32k_prompt(start_server: Start, tiny: dict[str, Path], tmp_path: Path) -> None:
    target = stretched(tiny["llama"], tmp_path / "target")
    draft = stretched(tiny["draft"], tmp_path / "draft")
    text = "".join(topics.values()).encode()[:PROMPT_LEN]
    assert len(text) == PROMPT_LEN
    payload = {
        "input_ids": list(text),
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_LEN, "ignore_eos": True},
    }
    room = ("--context-length", str(POSITIONS), "--max-total-tokens", str(POSITIONS + 256))
    answers = []
    for variant in (PLAIN, GRAFT):
        server = start_server(f"long-{variant.name}", target, *room, *variant.args(str(draft)))
        server.process.wait_ready(READY_TIMEOUT_S)
        answers.append(server.generate(payload))
        server.stop()
    plain, grafted = answers
    assert grafted["meta_info"]["prompt_tokens"] == PROMPT_LEN
    assert grafted["output_ids"] == plain["output_ids"]
    assert len(grafted["output_ids"]) == ANSWER_LEN
    print(f"accept length after {PROMPT_LEN} tokens: {accept_length([grafted]):.2f}")
    assert accept_length([grafted]) > 1.0
