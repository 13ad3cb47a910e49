"""Parts of the live page's server side that need no server: pictures, counts, logins, masked keys."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
import torch

from sgl_graft.serving.browser_login import BrowserLogin
from sgl_graft.serving.camera import Camera, on_path, picture, shape_of
from sgl_graft.serving.secrets import MASK, mask_command_line, mask_settings, masked
from sgl_graft.serving.verify_counts import VerifyCounts


def test_a_picture_leaves_empty_slots_out() -> None:
    found = picture(
        tokens=[7, 8, -1, 9, 5], parents=[-1, 0, -1, 1, 0], sources=[2, 1, 0, 2, 3],
        accepted=[True, True, False, True, False], committed=[8, 9, 4, 0, 0], length=3,
    )  # fmt: skip
    assert found.tokens == [7, 8, 9, 5] and found.parents == [-1, 0, 1, 0]
    assert found.sources == [0, 1, 2, 3] and found.accepted == [True, True, True, False]
    assert found.bonus == 4
    assert shape_of(found) == {"parents": [-1, 0, 1, 0], "sources": [0, 1, 2, 3], "accepted": found.accepted}


def test_on_path_reads_flat_indices() -> None:
    index = torch.tensor([[0, 2, -1], [4, 5, 7]])
    assert on_path(index, 2, 4).tolist() == [[True, False, True, False], [True, True, False, True]]


def test_the_camera_takes_only_what_was_asked_for() -> None:
    camera = Camera()
    assert not camera.wanted and camera.last() is None and camera.wanted
    tree = torch.tensor([[1, 2], [3, 4]])
    parents, ones = torch.tensor([[-1, 0], [-1, 0]]), torch.ones_like(tree)
    camera.take(tree, parents, ones, ones.bool(), tree, torch.tensor([1, 1]))
    assert not camera.wanted
    found = camera.last()
    assert found is not None and found.tokens == [1, 2] and camera.wanted


def test_verifies_are_counted_by_depth() -> None:
    counts = VerifyCounts()
    counts.add([0, 2])
    counts.add([3])
    assert (counts.rounds, counts.committed) == (3, 8) and counts.accepted_at == [0, 2, 2, 1]
    assert counts.accept_length == pytest.approx(8 / 3)


def serve(
    path: str, method: str = "GET", status: int = 200, **headers: str
) -> tuple[dict[bytes, bytes], Any]:
    """What an application behind `BrowserLogin` is sent, and how its answer begins."""
    seen: dict[bytes, bytes] = {}
    sent: list[Any] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        seen.update(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "method": method, "headers": raw}
    asyncio.run(BrowserLogin(app, "the:key")(scope, None, send))  # type: ignore[arg-type]
    return seen, sent[0]


PASSWORD = "Basic " + base64.b64encode(b"me:the:key").decode()
ASKED = (("/graft/", 401), ("/graft/status", 401), ("/graft/", 200))
NO_COLON = "Basic " + base64.b64encode(b"no colon").decode()


def test_a_browsers_password_is_taken_for_the_key() -> None:
    seen, _ = serve("/graft/status", authorization=PASSWORD)
    assert seen[b"authorization"] == b"Bearer the:key"


@pytest.mark.parametrize(
    ("path", "method", "headers"),
    [
        ("/v1/models", "GET", {}),
        ("/graft/table/clear", "POST", {}),
        ("/graft/status", "POST", {}),
        ("/graft/status", "GET", {"origin": "https://elsewhere.example"}),
    ],
)
def test_not_elsewhere_and_not_for_other_sites(path: str, method: str, headers: dict[str, str]) -> None:
    seen, _ = serve(path, method, authorization=PASSWORD, **headers)
    assert seen[b"authorization"] == PASSWORD.encode()


@pytest.mark.parametrize("value", ["Bearer a", "Basic", "Basic !!", NO_COLON])
def test_other_headers_stay_as_they_are(value: str) -> None:
    assert serve("/graft/", authorization=value)[0][b"authorization"] == value.encode()


def test_only_the_page_asks_for_a_password() -> None:
    asked = [dict(serve(path, status=status)[1]["headers"]) for path, status in ASKED]
    assert [b"www-authenticate" in headers for headers in asked] == [True, False, False]


def test_the_right_key_of_the_wrong_role_is_403() -> None:
    for key, status in (("Bearer the:key", 403), (PASSWORD, 403), ("Bearer other", 401)):
        assert serve("/graft/tree", status=401, authorization=key)[1]["status"] == status
    assert serve("/v1/models", status=401, authorization="Bearer the:key")[1]["status"] == 401
    assert serve("/graft/tree", status=200, authorization="Bearer the:key")[1]["status"] == 200


def test_keys_are_masked() -> None:
    settings = {"api_key": "s3cret", "admin_api_key": None, "port": 1}
    assert mask_settings(settings) == {"api_key": MASK, "admin_api_key": None, "port": 1}
    assert mask_settings("text") == "text"
    argv = ["--api-key", "s3cret", "--port", "1", "--admin-api-key=t0p"]
    assert mask_command_line(" ".join(argv), argv) == f"--api-key {MASK} --port 1 --admin-api-key={MASK}"
    assert masked(argv) == ["--api-key", MASK, "--port", "1", f"--admin-api-key={MASK}"]
