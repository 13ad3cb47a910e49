"""What goes in and comes out of ``/graft/*``: the models of the OpenAPI page."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """Base of every request: a misspelt field is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")


class TableName(Body):
    """A table's file in ``graft.table.folder``."""

    name: str = Field(min_length=1, max_length=100, examples=["evening.table"])


class CalibrateBody(Body):
    """How long to look, or that the calibration of the start is wanted back."""

    rounds: int = Field(default=2000, ge=1, le=10_000_000, description="verifies, a batch's counting once")
    restore: bool = Field(default=False, description="use what the server started with again")


class RollbackBody(Body):
    """Which version of the draft to return to."""

    version: int | None = Field(default=None, ge=0, description="null: the one before")


class TableSaved(BaseModel):
    """A table was written."""

    name: str
    bytes: int


class TableChanged(BaseModel):
    """A table was loaded or emptied, on every rank."""

    done: str


class CalibrationState(BaseModel):
    """How far a calibration on live traffic is."""

    counting: bool
    rounds_counted: int
    rounds_wanted: int
    fitted_on: int = Field(description="rounds that the maps in use were fitted on; 0: those of the start")


class TreeShape(BaseModel):
    """The tree of one request's last round, without what it says; slot 0 is the root."""

    parents: list[int]
    sources: list[int] = Field(description="1 the draft, 2 the successor table, 3 both, 0 not told apart")
    accepted: list[bool]


class Tree(TreeShape):
    """The same with tokens: text of a user."""

    tokens: list[int]
    texts: list[str]
    bonus: str


class RankStatus(BaseModel):
    """Totals since start, of the first rank of one data-parallel group."""

    rounds: int = Field(description="verifies, counted per request")
    committed_tokens: int
    accept_length: float = Field(description="tokens committed per verify, bonus included")
    accepted_at: dict[str, list[int]] = Field(description="accepted slots by source, then by depth")
    proposed_at: dict[str, list[int]] | None = Field(default=None, description="used slots, the same way")
    stages: list[int] | None = Field(default=None, description="requests by gate stage (GRAFT)")
    block_sizes: dict[str, int] | None = Field(default=None, description="rounds by block size (BLOCKPILOT)")
    table: dict[str, Any] | None = None
    tree: TreeShape | None = Field(default=None, description="asking for it makes the next round take it")
    calibration: CalibrationState | None = None
    adaptation: dict[str, Any] | None = None
    details: dict[str, Any] = Field(default_factory=dict)


class Status(BaseModel):
    """What this server's speculation did."""

    algorithm: str | None
    version: str = Field(description="of sgl_graft")
    started: float = Field(description="seconds since 1970; changes when the server was started again")
    time: float
    ranks: list[RankStatus]


class Refused(BaseModel):
    """Why not: SGLang's own shape of an error."""

    object: str = "error"
    message: str
    type: str
    param: str | None = None
    code: int
