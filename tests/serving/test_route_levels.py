"""Who may call which of our routes, in SGLang's own check of keys, on an application of its kind."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sgl_graft.algorithms import ALGORITHM_VARIABLE
from sgl_graft.serving import routes
from sgl_graft.serving.http_app import accept_browser_logins, add_routes

USER, ADMIN = "user", "admin"
LOOKING = {"/graft/", "/graft/status"}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    from sglang.srt.utils.auth import add_api_key_middleware

    async def answer(name: str, _body: Any = None) -> list[dict[str, Any]]:
        calibration = {"counting": True, "rounds_counted": 0, "rounds_wanted": 1, "fitted_on": 0}
        return [{"tree": None, "bytes": 1} | (calibration if name == "calibrate" else {})]

    monkeypatch.delenv(ALGORITHM_VARIABLE, raising=False)
    monkeypatch.setattr(routes, "ask", answer)
    app = FastAPI()
    add_routes(None, app)
    add_api_key_middleware(app, api_key=USER, admin_api_key=ADMIN)
    accept_browser_logins(None, app, api_key=USER, admin_api_key=ADMIN)
    return TestClient(app)


def call(client: TestClient, method: str, path: str, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"name": "a"} if path.endswith(("save", "load")) else None
    return client.request(method, path, headers=headers, json=body).status_code


def test_every_route_has_its_level(client: TestClient) -> None:
    paths = client.get("/openapi.json", headers={"Authorization": f"Bearer {USER}"}).json()["paths"]
    assert paths.keys() >= LOOKING and len(paths) == len(routes.router.routes) == 10
    for path, operations in paths.items():
        for method in operations:
            answers = [call(client, method, path, key) for key in (None, "guess", USER, ADMIN)]
            # SGLang's normal routes want the user's key, also of an administrator.
            wanted = [401, 401, 200, 401] if path in LOOKING else [401, 401, 403, 200]
            assert answers == wanted, path


def test_too_much_is_refused_before_it_is_read(client: TestClient) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    body = {"name": "a" * (routes.MAX_BODY + 1)}
    assert client.post("/graft/table/save", headers=headers, json=body).status_code == 413


def test_a_server_without_our_algorithms_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALGORITHM_VARIABLE, raising=False)
    app = FastAPI()
    add_routes(None, app)
    answer = TestClient(app).post("/graft/table/clear")
    assert answer.status_code == 409 and "none of sgl_graft's algorithms" in answer.text
