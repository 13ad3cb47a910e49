"""A GRAFT server with both API keys: who may do what, what is told to nobody, and tenants that do not meet.

It serves the scripted target with both parsers, so `make test` has those under speculation, too (whole
answers; `make soak` has streamed ones).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import scripted
from .chromium import Chromium, needs_chromium
from .conftest import READY_TIMEOUT_S, ROOMY
from .payloads import PROMPTS, request
from .server import Server, Start
from .test_parsers import check_whole
from .variants import Variant

USER, ADMIN = "user-key-54f1b2", "admin-key-9c07d3"
VARIANT = Variant("graft-keys", "GRAFT", (5, 4, 16))
READING = (("GET", "status"), ("GET", ""))
WRITING = (
    ("GET", "tree"), ("POST", "table/save"), ("POST", "table/load"), ("POST", "table/clear"),
    ("POST", "calibrate"), ("POST", "adaptation/pause"), ("POST", "adaptation/resume"),
    ("POST", "adaptation/rollback"),
)  # fmt: skip


@pytest.fixture(scope="module")
def keyed(start_server: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server; what its tests send through `Server.client` carries the user's key."""
    folders = scripted.build(tmp_path_factory.mktemp("scripted"))
    args = (*ROOMY, *scripted.arguments(VARIANT, folders), "--enable-metrics", "--log-requests")
    args += ("--api-key", USER, f"--admin-api-key={ADMIN}")
    server = start_server(VARIANT.name, folders["target"], *args, OMP_NUM_THREADS="1")
    server.client.headers["Authorization"] = f"Bearer {USER}"
    with httpx.Client(base_url=server.url, headers=server.client.headers, trust_env=False) as client:
        server.process.wait_ready(READY_TIMEOUT_S)
        assert client.get("/v1/models").status_code == 200
    yield server
    server.stop()


def ask(server: Server, method: str, path: str, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body: Any = {"name": "a"} if path in ("table/save", "table/load") else None
    url = f"{server.url}/graft/{path}"
    return httpx.request(method, url, headers=headers, json=body, trust_env=False, timeout=60).status_code


def test_without_a_key_nothing_is_shown_or_done(keyed: Server) -> None:
    for method, path in (*READING, *WRITING):
        assert ask(keyed, method, path, None) == 401, path
        assert ask(keyed, method, path, "guess") == 401, path


def test_the_users_key_reads_and_the_administrators_writes(keyed: Server) -> None:
    for method, path in READING:
        assert ask(keyed, method, path, USER) == 200, path
    for method, path in WRITING:
        assert ask(keyed, method, path, USER) == 403, path
        assert ask(keyed, method, path, ADMIN) in (200, 409), path


def test_private_tables_are_refused_to_the_administrator_as_well(keyed: Server) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    for path in ("table/save", "table/load"):
        answer = httpx.post(f"{keyed.url}/graft/{path}", headers=headers, json={"name": "a"}, trust_env=False)
        assert answer.status_code == 409 and "private and never stored" in answer.text
    assert ask(keyed, "POST", "table/clear", ADMIN) == 200


def test_no_key_is_in_logs_status_or_metrics(keyed: Server) -> None:
    keyed.generate(request(PROMPTS[0], 20))
    told = {
        "log": keyed.log_text().split("\n", 1)[1],  # the first line is the command, written by the test
        "status": keyed.client.get("/graft/status").text,
        "metrics": httpx.get(f"{keyed.url}/metrics", trust_env=False).text,
        "server_info": keyed.client.get("/server_info").text,
        "model_info": keyed.client.get("/model_info").text,
        "openapi": keyed.client.get("/openapi.json").text,
    }
    for place, text in told.items():
        assert len(text) > 200 and USER not in text and ADMIN not in text, place
    assert "<redacted>" in told["log"] and "<redacted>" in told["server_info"]


def test_no_text_of_a_user_is_in_status_or_metrics(keyed: Server) -> None:
    secret = "Xylophone77"
    keyed.generate(request(f"{secret} is the password. {secret} is the", 30))
    for url in ("/graft/status", "/metrics"):
        assert secret not in keyed.client.get(url).text


def flush(server: Server) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    answer = httpx.post(f"{server.url}/flush_cache", headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 200


@pytest.mark.soak
def test_one_tenants_requests_do_not_change_anothers(keyed: Server) -> None:
    """Scope `request`, the default with keys: what others ask leaves no trace in one's own counts."""
    (rank,) = keyed.client.get("/graft/status").json()["ranks"]
    assert rank["table"]["scope"] == "request"
    probe = request(PROMPTS[3], 60)
    flush(keyed)
    alone = keyed.generate(probe)["meta_info"]
    for _ in range(2):  # another tenant says the very same, and other things
        keyed.generate_all([probe, *(request(prompt, 60) for prompt in PROMPTS)], 4)
    flush(keyed)
    after = keyed.generate(probe)["meta_info"]
    for count in ("spec_accept_length", "spec_verify_ct", "spec_num_correct_drafts", "graft"):
        assert after[count] == alone[count], count


def test_parsers_under_speculation(keyed: Server) -> None:
    check_whole(keyed.url, USER)


@needs_chromium
def test_a_browser_asks_for_the_key(keyed: Server, tmp_path: Path) -> None:
    with Chromium(tmp_path) as browser:
        page = browser.page()
        page.open(keyed.url.replace("http://", f"http://anyone:{USER}@") + "/graft/", keyed.url + "/graft/")
        page.wait("document.getElementById('state').textContent.includes('live')")
        assert "GRAFT" in page.run("document.getElementById('algorithm').textContent")


def test_wrong_keys_end_a_command_line_client(keyed: Server) -> None:
    page = keyed.client.get("/graft/", auth=("x", USER))
    write = keyed.client.post("/graft/table/clear", auth=("x", USER))
    assert (page.status_code, write.status_code) == (200, 401), "a password is taken for looking only"
    assert json.loads(keyed.client.get("/graft/status").text)["algorithm"] == "GRAFT"
