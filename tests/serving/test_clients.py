"""The clients that people use: the official `openai` package and SGLang's own load generator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from .payloads import PROMPTS
from .server import Reference, Server
from .variants import EAGLE_TREE

BENCH_REQUESTS = 8
BENCH_TOKENS = 16


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)


def ask(server: Server, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": PROMPTS[0]}]
    client = openai_client(server)
    return client.chat.completions.create(model="default", messages=messages, max_tokens=30, **options)


def test_chat_through_the_openai_client(speculative: Server, reference: Reference) -> None:
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}):
        expected = ask(reference.server, **options).choices[0]
        answer = ask(speculative, **options)
        assert answer.choices[0].message.content == expected.message.content
        assert answer.choices[0].finish_reason == expected.finish_reason
        assert answer.usage.completion_tokens == 30

        usage = {"stream_options": {"include_usage": True}}
        chunks = list(ask(speculative, stream=True, **usage, **options))
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == expected.message.content
        assert chunks[-1].usage.completion_tokens == 30


def test_completions_with_logprobs_through_the_openai_client(
    speculative: Server, reference: Reference
) -> None:
    def complete(server: Server) -> Any:
        return openai_client(server).completions.create(
            model="default", prompt=list(PROMPTS[:2]), max_tokens=12, temperature=0, logprobs=2
        )

    for got, expected in zip(complete(speculative).choices, complete(reference.server).choices, strict=True):
        assert got.text == expected.text
        assert got.logprobs.tokens == expected.logprobs.tokens
        assert len(got.logprobs.token_logprobs) == 12


@pytest.mark.parametrize("speculative", [EAGLE_TREE], ids=["tree"], indirect=True)
def test_bench_serving(speculative: Server, tmp_path: Path) -> None:
    output = tmp_path / "bench.jsonl"
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", speculative.url),
        *(
            "--model",
            str(speculative.model),
            "--tokenizer",
            str(speculative.model),
            "--dataset-name",
            "random-ids",
        ),
        *("--random-input-len", "24", "--random-output-len", str(BENCH_TOKENS), "--random-range-ratio", "1"),
        *("--num-prompts", str(BENCH_REQUESTS), "--output-file", str(output), "--disable-tqdm"),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    result = json.loads(output.read_text())
    assert result["completed"] == BENCH_REQUESTS
    assert result["total_output_tokens"] == BENCH_REQUESTS * BENCH_TOKENS
    assert result["accept_length"] > 1.0
