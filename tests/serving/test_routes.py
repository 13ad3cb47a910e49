"""`/graft/*` on running servers: status, picture, tables by name, calibration, refusals of each algorithm."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from .graft_tools import write_garbage_table
from .payloads import PROMPTS, check, check_all, request
from .server import Reference, Server
from .variants import SPECULATIVE, TABLES, Variant

VARIANT = {variant.name: variant for variant in SPECULATIVE}
GRAFT, BLOCKPILOT, SPECBLOCK = VARIANT["graft"], VARIANT["blockpilot"], VARIANT["specblock"]


def on(*variants: Variant) -> Any:
    """Run a test on these variants' servers."""
    return pytest.mark.parametrize("speculative", variants, ids=lambda variant: variant.name, indirect=True)


def status(server: Server) -> dict[str, Any]:
    """The first rank's status, at most as old as viewers may share it."""
    time.sleep(1.1)
    answer = server.client.get("/graft/status")
    assert answer.status_code == 200, answer.text
    (rank,) = answer.json()["ranks"]
    found: dict[str, Any] = rank
    return found


def post(server: Server, path: str, body: Any = None) -> tuple[int, str]:
    answer = server.client.post(f"/graft/{path}", json=body)
    return answer.status_code, answer.text


@on(GRAFT, BLOCKPILOT, SPECBLOCK)
def test_status_counts_and_shows_the_last_round(speculative: Server) -> None:
    before = status(speculative)
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            speculative.generate(request(PROMPTS[1], 60))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while (after := status(speculative))["tree"] is None and time.monotonic() < deadline:
            pass
        words = speculative.client.get("/graft/tree").json()
    finally:
        stop.set()
        thread.join()
    rounds, tokens = (
        after["rounds"] - before["rounds"],
        after["committed_tokens"] - before["committed_tokens"],
    )
    assert rounds > 0 and tokens / rounds > 1.1
    assert sum(map(sum, after["accepted_at"].values())) == after["committed_tokens"] - after["rounds"]
    for tree in (after["tree"], words):
        parents = tree["parents"]
        assert parents[0] == -1 and all(0 <= parent < index for index, parent in enumerate(parents) if index)
        assert tree["accepted"][0] and len(tree["sources"]) == len(tree["accepted"]) == len(parents)
        accepted = {index for index, hit in enumerate(tree["accepted"]) if hit}
        assert all(parents[index] in accepted for index in accepted - {0}), "accepted nodes are one path"
        assert not ({"tokens", "texts", "bonus"} & tree.keys()) or tree is words
    assert len(words["texts"]) == len(words["parents"]) and isinstance(words["bonus"], str)


@on(GRAFT)
def test_a_table_is_saved_cleared_and_loaded(speculative: Server, reference: Reference) -> None:
    check_all(speculative, reference, [request(prompt, 40) for prompt in PROMPTS])
    filled = status(speculative)["table"]["order1_rows_filled"]
    code, text = post(speculative, "table/save", {"name": "evening.table"})
    assert code == 200 and json.loads(text)["bytes"] == (TABLES / "evening.table").stat().st_size
    assert (TABLES / "evening.table").stat().st_mode & 0o077 == 0
    assert post(speculative, "table/clear") == (200, '{"done":"cleared"}')
    assert status(speculative)["table"]["order1_rows_filled"] == 0 < filled
    assert post(speculative, "table/load", {"name": "evening.table"})[0] == 200
    assert status(speculative)["table"]["order1_rows_filled"] == filled
    check(speculative, reference, request(PROMPTS[0], 40))
    # Also one whose content is garbage: it may only change speed.
    write_garbage_table(TABLES / "garbage", speculative.model)
    assert post(speculative, "table/load", {"name": "garbage"})[0] == 200
    check(speculative, reference, request(PROMPTS[2], 40))
    assert post(speculative, "table/clear")[0] == 200


@on(GRAFT)
def test_paths_and_foreign_files_are_refused(speculative: Server, tmp_path: Path) -> None:
    outside = write_garbage_table(tmp_path / "outside", speculative.model)
    (TABLES / "notes").write_text("not a table")
    save_file({"tokens": torch.zeros(3)}, TABLES / "other.safetensors")
    (TABLES / "link").unlink(missing_ok=True)
    (TABLES / "link").symlink_to(outside)
    (TABLES / "folder").mkdir(exist_ok=True)
    before = status(speculative)["table"]
    names = ["../outside", str(outside), "a/b", "..", ".", ".hidden", "a\\b", "x\n", "%2e%2e", "link"]
    names.append("folder")
    for name in [*names, "notes", "other.safetensors", "missing"]:
        code, text = post(speculative, "table/load", {"name": name})
        assert code == 409, (name, text)
        assert str(TABLES) not in text, "a path of the machine is nobody's business"
    for name in names:
        assert post(speculative, "table/save", {"name": name})[0] == 409, name
    assert outside.is_file() and not list(tmp_path.glob("*.tmp"))
    for wrong in ({}, {"name": ""}, {"name": "x" * 101}, {"name": 3}, {"name": "a", "path": "/tmp"}, []):
        assert post(speculative, "table/save", wrong)[0] == 400, wrong
    assert status(speculative)["table"] == before


@on(GRAFT)
def test_large_bodies_are_refused_before_they_are_read(speculative: Server) -> None:
    assert post(speculative, "table/save", {"name": "a" * 20_000})[0] == 413

    def endless() -> Iterator[bytes]:
        yield b'{"name": "'
        for _ in range(2000):
            yield b"a" * 1000

    answer = speculative.client.post("/graft/table/save", content=endless())
    assert answer.status_code == 413


@on(GRAFT)
def test_calibration_on_live_traffic(speculative: Server, reference: Reference) -> None:
    code, text = post(speculative, "calibrate", {"rounds": 12})
    assert code == 200 and json.loads(text)["counting"]
    check_all(speculative, reference, [request(prompt, 50) for prompt in PROMPTS], concurrency=2)
    state = status(speculative)["calibration"]
    assert state == {"counting": False, "rounds_counted": 0, "rounds_wanted": 0, "fitted_on": 12}
    check(speculative, reference, request(PROMPTS[3], 50))
    assert post(speculative, "calibrate", {"restore": True})[0] == 200
    assert status(speculative)["calibration"]["fitted_on"] == 0
    assert post(speculative, "calibrate", {"rounds": 0})[0] == 400


@on(GRAFT, BLOCKPILOT, SPECBLOCK)
def test_what_cannot_be_done_is_refused_with_the_reason(speculative: Server, request: Any) -> None:
    variant = request.node.callspec.params["speculative"]
    if variant is not SPECBLOCK:
        for action in ("pause", "resume", "rollback"):
            code, text = post(speculative, f"adaptation/{action}")
            assert code == 409 and "does not adapt its draft" in text
    if variant is not GRAFT:
        code, text = post(speculative, "table/save", {"name": "a"})
        assert code == 409 and "keeps no table on disk" in text
        code, text = post(speculative, "calibrate", {"rounds": 5})
        assert code == 409 and "is not calibrated while it serves" in text
    speculative.generate({"text": "still alive", "sampling_params": {"max_new_tokens": 4}})


@on(GRAFT)
def test_the_openapi_page_describes_the_routes(speculative: Server) -> None:
    document = speculative.client.get("/openapi.json").json()
    ours = {path: item for path, item in document["paths"].items() if path.startswith("/graft/")}
    assert len(ours) == 10
    for path, item in ours.items():
        for operation in item.values():
            answer = operation["responses"]["200"]["content"]
            assert path == "/graft/" or "application/json" in answer
            assert operation["description"] and (path == "/graft/" or "409" in operation["responses"])
    assert {"Status", "RankStatus", "TableName", "CalibrateBody"} <= document["components"]["schemas"].keys()


@on(GRAFT)
def test_the_page_comes_alone(speculative: Server) -> None:
    answer = speculative.client.get("/graft/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = answer.text.replace("http://www.w3.org/2000/svg", "")
    assert not any(outside in page for outside in ("http://", "https://", "src=", "@import"))
