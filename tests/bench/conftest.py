"""Fixtures: a target folder with a small tokenizer, prompt files, and fake servers."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from rich.console import Console

from sgl_graft.bench.plan import Sampling, parse_variants
from sgl_graft.bench.prompts import Dataset, Prompt
from sgl_graft.bench.runner import Bench, BenchOptions
from sgl_graft.bench.server import free_port

from . import fake_server

FAKE_COMMAND = (sys.executable, str(Path(fake_server.__file__)))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    words = {f"w{i}": i for i in range(50)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {"[UNK]": 50, "<user>": 51, "<bot>": 52} | words,
            "unk_token": "[UNK]",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for m in messages %}<user> {{ m.content }} {% endfor %}<bot>"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "words.jsonl"
    rows = [{"turns": [f"w1 w{i}", "never sent"]} for i in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def start_fake() -> Iterator[Callable[..., tuple[str, Any]]]:
    """Start fakes inside this process; gives (url, list of calls)."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(**settings: Any) -> tuple[str, Any]:
        app = fake_server.create_app(**settings)
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < deadline, "the fake did not start"
            time.sleep(0.01)
        running.append((server, thread))
        return f"http://127.0.0.1:{port}", app.state.calls

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(timeout=10)


@pytest.fixture
def make_bench(tmp_path: Path, target: Path) -> Callable[..., Bench]:
    """A bench over two tiny data sets; keyword arguments override options."""

    def make(
        variants: str,
        *,
        urls: dict[str, str] | None = None,
        refine: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Bench:
        named = [f"{name}={url}" for name, url in (urls or {}).items()]
        defaults: dict[str, Any] = {
            "target": target,
            "embedded": False,
            "variants": parse_variants(variants, urls=named, **(refine or {})),
            "datasets": tuple(
                Dataset(name, tuple(Prompt(i, (base, i), base + i) for i in range(4)))
                for base, name in ((1, "one"), (2, "two"))
            ),
            "sampling": Sampling(max_new_tokens=11),
            "temperatures": (0.0,),
            "concurrencies": (1, 3),
            "repeats": 2,
            "output": tmp_path / "out" / "result.json",
            "device": "cpu",
            "start_timeout_s": 30.0,
            "request_timeout_s": 30.0,
            "server_command": FAKE_COMMAND,
        }
        return Bench(BenchOptions(**(defaults | changes)), Console(file=StringIO(), width=120))

    return make
