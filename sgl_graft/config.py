"""One frozen, typed configuration for everything; unknown keys are rejected with the allowed ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

CONFIG_VARIABLE = "SGLGRAFT_CONFIG"


class Section(BaseModel):
    """Base of every section: immutable, strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TableConfig(Section):
    """The successor table.

    Attributes:
        row_width: successors kept per row (k).
        order2_rows: rows keyed by the last two tokens; 0 switches them off.
        scope: who shares a table: all requests, or nobody. None: nobody when API keys are set, else all.
        seed_prompts: learn the prompt's own next tokens at prefill.
        path: file to load at start; refused when it belongs to another tokenizer or target.
        save_path: file the server saves its table to, and loads at start when it is there. It holds traces
            of users' text: mode 0600, deleted by ``sgl-graft forget``.
        save_every_s: seconds between two saves.
    """

    row_width: int = Field(default=8, ge=1, le=16)
    order2_rows: int = Field(default=65536, ge=0, le=2**24)
    scope: Literal["shared", "request"] | None = None
    seed_prompts: bool = True
    path: Path | None = None
    save_path: Path | None = None
    save_every_s: float = Field(default=300.0, gt=0)

    @model_validator(mode="after")
    def _files_need_a_shared_table(self) -> TableConfig:
        if self.scope == "request" and (self.path or self.save_path):
            raise ValueError("a private table (scope request) is never stored; leave path and save_path out")
        return self


class GraftConfig(Section):
    """GRAFT: pruning, retrieval and grafting inside the EAGLE worker.

    Attributes:
        rule: how slots are chosen, ``value`` (ours) or ``staged`` (the paper's).
        base: the engine algorithm that GRAFT patches.
        depth: levels below the root a tree may have; at least the draft's steps. None: the
            paper's 9, or what fits into the slots.
        calibration: file written by ``sgl-graft calibrate``; None takes the packaged one for the draft.
        thresholds: one gate threshold per checkpoint of the ``staged`` rule, over the calibrated ones.
        collect: file to write calibration counters to while serving; slower, for ``sgl-graft calibrate``.
    """

    rule: Literal["value", "staged"] = "value"
    base: Literal["EAGLE3", "EAGLE"] = "EAGLE3"
    depth: int | None = Field(default=None, ge=1, le=32)
    calibration: Path | None = None
    collect: Path | None = None
    thresholds: tuple[float, ...] | None = None
    table: TableConfig = TableConfig()

    @model_validator(mode="after")
    def _thresholds_are_probabilities(self) -> GraftConfig:
        for value in self.thresholds or ():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"thresholds must be probabilities in [0, 1], got {value}")
        return self


class Config(Section):
    """The whole configuration file."""

    graft: GraftConfig = GraftConfig()


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            section: Any = model
            for part in item["loc"][:-1]:
                section = section.model_fields[str(part)].annotation
            allowed = ", ".join(sorted(section.model_fields))
            lines.append(f"unknown key {where!r}; allowed here: {allowed}")
        else:
            lines.append(f"{where}: {item['msg']} (got {item['input']!r})")
    return "; ".join(lines)


def parse_config(data: Any, origin: str) -> Config:
    """Validate a mapping.

    Raises:
        ValueError: the value and the allowed keys, with where it came from.
    """
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ValueError(f"{origin}: expected a mapping of sections, got {type(data).__name__}")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{origin}: {_explain(error, Config)}") from error


def load_config_text(text: str) -> Config:
    """Read inline JSON, or a YAML or JSON file.

    Raises:
        ValueError: the file is missing or unreadable, or its content is not a valid configuration.
    """
    if text.lstrip().startswith("{"):
        origin, body = "--graft-config", text
    else:
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"--graft-config {text}: no such file; give a YAML or JSON file, or inline JSON")
        origin, body = f"--graft-config {text}", path.read_text()
    try:
        data = yaml.safe_load(body)
    except yaml.YAMLError as error:
        raise ValueError(f"{origin}: not valid YAML or JSON: {error}") from error
    return parse_config(data, origin)


def current_config() -> Config:
    """The configuration this server was started with (children inherit it through the environment)."""
    text = os.environ.get(CONFIG_VARIABLE)
    return parse_config(json.loads(text), CONFIG_VARIABLE) if text else Config()
