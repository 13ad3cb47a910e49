"""Generators of bad input, and what each reader may do with it. Run by test_readers.py and by the soak.

A reader takes a file or a text that anybody may have damaged. It may return, or raise ValueError that names
the place; anything else is a mistake. A case is its seed: `case(reader, seed)` is the same for ever.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from sgl_graft.cuda_graph.successor_table import SuccessorTable

from sgl_graft.blockpilot.costs import read_costs
from sgl_graft.blockpilot.policy import read_replay
from sgl_graft.blockpilot.policy_file import read_policy
from sgl_graft.config import Config, load_config_text
from sgl_graft.graft.calibration import Calibration, read_calibration, write_calibration
from sgl_graft.graft.store import TableIdentity, read_own_table, save_table
from sgl_graft.serving.load_costs import LoadCosts, read_load_costs
from sgl_graft.serving.request_settings import settings_of

WEIRD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, -(2**63), 10**30, 0.0, -0.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), "", " ", "nan", "null", "\x00", "~samples", "a" * 300),
    *("../../etc/passwd", "é", "\U0001f600", "1", [], {}, [[]], [None], {"": None}, [1, 2, 3], [0.5, 2.0]),
)


def mutated(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with one thing about it wrong, or a few."""
    if rng.random() < 0.15 or depth > 6:
        return rng.choice(WEIRD)
    if isinstance(value, dict) and value:
        copy = dict(value)
        for _ in range(rng.choice((1, 1, 2))):
            key = rng.choice(list(copy) or [""])
            what = rng.random()
            if what < 0.2:
                copy.pop(key, None)
            elif what < 0.4:
                name = rng.choice([str(key) + "s", "", "path", "graft", str(rng.choice(WEIRD))[:40]])
                copy[name] = rng.choice(WEIRD)
            else:
                copy[key] = mutated(rng, copy.get(key), depth + 1)
        return copy
    if isinstance(value, list) and value:
        copy = list(value)
        index = rng.randrange(len(copy))
        what = rng.random()
        if what < 0.2:
            del copy[index]
        elif what < 0.4:
            copy.insert(index, rng.choice(WEIRD))
        else:
            copy[index] = mutated(rng, copy[index], depth + 1)
        return copy
    if isinstance(value, (int, float)) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice((value + 1, value - 1, -value, value * 1000, float(value), str(value)))
    return rng.choice(WEIRD)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Bytes cut short, overwritten, doubled, or with bits flipped."""
    if not content:
        return rng.randbytes(20)
    at = rng.randrange(len(content))
    what = rng.randrange(5)
    if what == 0:
        return content[:at]
    if what == 1:
        return content[:at] + rng.randbytes(rng.randrange(1, 40)) + content[at:]
    if what == 2:
        return content[:at] + rng.randbytes(min(8, len(content) - at)) + content[at + 8 :]
    if what == 3:
        flipped = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    return content[at:] + content[:at]


@dataclass(frozen=True)
class Reader:
    """One reader of files or texts.

    Attributes:
        good: a document that it takes.
        read: called with the folder of the case and the damaged content.
        structured: whether a case may change the document's values, not its bytes alone.
    """

    good: Any
    read: Callable[[Path, bytes], Any]
    structured: bool = True


_GRAFT = json.loads(Config().graft.model_dump_json()) | {"load_cap": {"above": 4, "margin": 0.1, "hold": 3}}
GOOD_CONFIG = json.loads(Config().model_dump_json()) | {
    "graft": _GRAFT,
    "blockpilot": json.loads(Config().blockpilot.model_dump_json()) | {"candidates": [3, 4], "default": 4},
}
MINE = TableIdentity("t", "k")


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "file"
    path.write_bytes(content)
    return path


def _table(folder: Path, content: bytes) -> None:
    """A server's own saved table: a damaged one is set aside, and the table is then empty."""
    table = SuccessorTable.create(12, 2, context_rows=4)
    stored = read_own_table(table, _file(folder, content), MINE)
    if stored is not None:
        stored.copy_into(table)
    else:
        assert int(table.tokens.max()) == -1 and float(table.probs.max()) == 0.0


def _good_table(folder: Path) -> bytes:
    table = SuccessorTable.create(12, 2, context_rows=4)
    table.tokens[3, 0] = 5
    path = folder / "good"
    save_table(table, path, MINE, 1.7e9)
    return path.read_bytes()


def _good_calibration(folder: Path) -> Any:
    path = folder / "good"
    write_calibration(path, Calibration(target="t", vocab_size=12))
    return json.loads(path.read_text())


def _config(folder: Path, content: bytes) -> None:
    path = folder / "graft.yaml"
    path.write_bytes(content)
    load_config_text(str(path))


def _inline(folder: Path, content: bytes) -> None:
    load_config_text("{" + content.decode("utf-8", "replace").lstrip("{"))


def readers(folder: Path) -> dict[str, Reader]:
    """By name; ``folder`` is for documents that only a writer can make."""
    costs = {"format": 1, "seconds": {"1": {"1": 0.1, "4": 0.2}, "8": {"1": 0.3, "4": 0.9}}, "device": "cpu"}
    load = LoadCosts(slots=8, steps=2, accept_len=2.0, seconds={1: {1: 0.1, 8: 0.2}}, device="cpu")
    policy = {"policy": "fixed", "default": 4, "candidates": [3, 4], "temperatures": [0.0, 1.0]}
    replay = {"sizes": {"a": [3, 4], "b": 2}, "default": 4, "random": {"seed": 1, "low": 2, "high": 5}}
    return {
        "config file": Reader(GOOD_CONFIG, _config),
        "inline config": Reader(GOOD_CONFIG, _inline),
        "table": Reader(_good_table(folder), _table, structured=False),
        "calibration": Reader(_good_calibration(folder), lambda f, c: read_calibration(_file(f, c), 12)),
        "block costs": Reader(costs, lambda f, c: read_costs(_file(f, c))),
        "load costs": Reader(load.model_dump(), lambda f, c: read_load_costs(_file(f, c))),
        "policy": Reader(policy, lambda f, c: read_policy(_file(f, c))),
        "replay": Reader(replay, lambda f, c: read_replay(_file(f, c), 4)),
        "request settings": Reader({"graft": {"group": "a", "enabled": True}}, _settings),
    }


def _settings(folder: Path, content: bytes) -> None:
    """``custom_params`` reach the server parsed, whatever they hold."""
    try:
        custom = json.loads(content)
    except (ValueError, RecursionError):
        return
    settings_of(custom)


def case(reader: Reader, seed: int) -> bytes:
    """The content of one case."""
    rng = random.Random(seed)
    if not reader.structured:
        return damaged(rng, reader.good)
    document = reader.good
    for _ in range(rng.choice((1, 1, 2, 3))):
        document = mutated(rng, document)
    if rng.random() < 0.2:
        text = yaml.safe_dump(document, allow_unicode=True)
    else:
        text = json.dumps(document)
    content = text.encode("utf-8", "surrogatepass")
    return damaged(rng, content) if rng.random() < 0.3 else content


def run(reader: Reader, folder: Path, seed: int) -> str | None:
    """Try one case; what was wrong with how it was taken, or None."""
    content = case(reader, seed)
    try:
        reader.read(folder, content)
    except ValueError as error:
        return None if str(error).strip() else "a ValueError that says nothing"
    except Exception as error:  # whatever else a reader raises is what is looked for
        return f"{type(error).__name__}: {error}"
    return None
