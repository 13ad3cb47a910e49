"""``/graft/*`` on SGLang's own HTTP application, behind its API keys.

Status and page need the API key where one is set. Whatever changes something, and the tree with a user's
text, needs the administrator's where one is set (SGLang's level ``ADMIN_OPTIONAL``, as its own such routes).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Body, HTTPException, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.types import Message, Receive

from ..algorithms import selected_algorithm
from .control_names import PREFIX
from .route_models import (
    CalibrateBody,
    CalibrationState,
    RankStatus,
    Refused,
    RollbackBody,
    Status,
    TableChanged,
    TableName,
    TableSaved,
    Tree,
)

MAX_BODY = 16_384  # bytes; the longest body that makes sense has a hundred
STATUS_AGE_S = 1.0  # viewers share one answer of the scheduler for so long
SAVE_TIMEOUT_S = 300.0
PAGE_POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "connect-src 'self'",
        "img-src data:",
    )
)

Answers = dict[int | str, dict[str, Any]]
READ: Answers = {409: {"model": Refused, "description": "what runs here cannot do it"}}
WRITE: Answers = READ | {413: {"model": Refused, "description": "the body is too large"}}


class SmallBodyRoute(APIRoute):
    """A route that stops reading a body that is too large, whatever its headers say."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def limited(request: Request) -> Response:
            answer: Response = await handler(Request(request.scope, _limited(request.receive)))
            return answer

        return limited


def _limited(receive: Receive) -> Receive:
    size = 0

    async def next_message() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY:
            raise HTTPException(413, f"the body has more than {MAX_BODY} bytes")
        return message

    return next_message


router = APIRouter(prefix="/graft", tags=["sgl_graft"], route_class=SmallBodyRoute)


async def ask(name: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Have the schedulers do something; one answer per data-parallel rank.

    Raises:
        HTTPException: 409 and the reason, when they cannot.
    """
    if selected_algorithm() is None:
        raise HTTPException(
            409,
            "this server runs none of sgl_graft's algorithms: start it with --speculative-algorithm GRAFT, "
            "BLOCKPILOT or SPECBLOCK",
        )
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import DumperControlReqInput

    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    request = DumperControlReqInput(method=PREFIX + name, body=body or {})
    answers = await manager.dumper_control(request)
    refused = [answer.error for answer in answers if not answer.success]
    if refused:
        raise HTTPException(409, refused[0])
    return [answer.response[0] for answer in answers]


class SharedStatus:
    """The status, asked for at most once in :data:`STATUS_AGE_S` however many look.

    Attributes:
        started: when this process was ready to answer, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self._lock = asyncio.Lock()
        self._until = 0.0
        self._body = b""

    async def body(self) -> bytes:
        """The JSON document."""
        async with self._lock:
            if time.monotonic() >= self._until:
                self._body = (await self._ask()).model_dump_json().encode()
                self._until = time.monotonic() + STATUS_AGE_S
            return self._body

    async def _ask(self) -> Status:
        algorithm = selected_algorithm()
        answers = [] if algorithm is None else await ask("status")
        return Status(
            algorithm=algorithm,
            version=version("sgl-graft"),
            started=self.started,
            time=time.time(),
            ranks=[RankStatus.model_validate(answer) for answer in answers],
        )


_shared = SharedStatus()


@router.get("/status", response_model=Status, responses=READ)
async def status() -> Response:
    """Totals since start: accept length, slots by source and depth, stages, block sizes, table."""
    headers = {"Cache-Control": "no-store"}
    return Response(await _shared.body(), media_type="application/json", headers=headers)


@router.get("/tree", responses=READ)
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def tree() -> Tree | None:
    """The tree of one request's last round with its text. Asking makes the next round take it."""
    found = (await ask("tree"))[0]["tree"]
    if found is None:
        return None
    from sglang.srt.entrypoints.http_server import get_global_state

    tokenizer = get_global_state().tokenizer_manager.tokenizer

    def text(token: int) -> str:
        return str(token) if tokenizer is None else str(tokenizer.decode([token]))

    bonus = found.pop("bonus")
    return Tree(**found, texts=[text(token) for token in found["tokens"]], bonus=text(bonus))


@router.post("/table/save", responses=WRITE)
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def save_table(body: TableName) -> TableSaved:
    """Write the successor table to a file of the server's table folder; answers when it is on disk."""
    await ask("table/save", {"name": body.name})
    deadline = time.monotonic() + SAVE_TIMEOUT_S
    while time.monotonic() < deadline:
        written = (await ask("table/saved"))[0]["bytes"]
        if written is not None:
            return TableSaved(name=body.name, bytes=written)
        await asyncio.sleep(0.05)
    raise HTTPException(504, f"the table is still being written after {SAVE_TIMEOUT_S:.0f} s")


@router.post("/table/load", responses=WRITE)
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def load_table(body: TableName) -> TableChanged:
    """Replace the successor table by a saved one."""
    await ask("table/load", {"name": body.name})
    return TableChanged(done=f"loaded {body.name}")


@router.post("/table/clear", responses=WRITE)
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def clear_table() -> TableChanged:
    """Empty the successor table; the file at graft.table.save_path goes, too. Tables saved by name stay."""
    await ask("table/clear")
    return TableChanged(done="cleared")


@router.post("/calibrate", responses=WRITE)
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def calibrate(body: Annotated[CalibrateBody, Body(default_factory=CalibrateBody)]) -> CalibrationState:
    """Calibrate GRAFT on the coming rounds of live traffic, or return to the calibration of the start."""
    return CalibrationState.model_validate((await ask("calibrate", body.model_dump()))[0])


@router.post("/adaptation/pause", responses=WRITE)
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def pause() -> dict[str, Any]:
    """Stop adapting the draft; what was learned stays in use."""
    return (await ask("adaptation/pause"))[0]


@router.post("/adaptation/resume", responses=WRITE)
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def resume() -> dict[str, Any]:
    """Adapt the draft again."""
    return (await ask("adaptation/resume"))[0]


@router.post("/adaptation/rollback", responses=WRITE)
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def rollback(body: Annotated[RollbackBody, Body(default_factory=RollbackBody)]) -> dict[str, Any]:
    """Return to an earlier version of the draft."""
    return (await ask("adaptation/rollback", body.model_dump()))[0]


_page = files("sgl_graft").joinpath("serving/page.html").read_text(encoding="utf-8")


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """A live page of the status."""
    return HTMLResponse(_page, headers={"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache"})
