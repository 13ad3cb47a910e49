"""What one request may say about its own speculation: ``custom_params.graft`` of its sampling parameters.

```
{"text": "...", "sampling_params": {"custom_params": {"graft": {"group": "team-a"}}}}
```

Every setting of this project travels under that one key. A mistake in it is refused where the request comes
in, with status 400; the scheduler never sees it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from ..config import Section, current_config

logger = logging.getLogger(__name__)

KEY = "graft"
LABEL = r"^[A-Za-z0-9][A-Za-z0-9._:@/-]{0,63}$"
_SAMPLES = "~"  # starts the labels made for the samples of one prompt; no user's label starts with it


class RequestSettings(Section):
    """Settings of one request.

    Attributes:
        group: with table scope ``group``, the requests that share what they teach and learn.
        enabled: False keeps the request out of the successor table: its trees hold the draft's nodes only,
            and the table learns nothing of its text. SGLang's own prefix cache is another matter.
        block_size: BLOCKPILOT: rows of this request's blocks, the last committed token among them; at most
            the server's ``--speculative-num-draft-tokens``.
        speculate: BLOCKPILOT: False decodes this request without speculation.
        learn: SPECBLOCK: False keeps the request out of what online adaptation learns from, as ``enabled``
            does.
    """

    group: str | None = Field(default=None, pattern=LABEL)
    enabled: bool = Field(default=True, strict=True)
    block_size: int | None = Field(default=None, ge=1, strict=True)
    speculate: bool = Field(default=True, strict=True)
    learn: bool = Field(default=True, strict=True)


def parse_settings(custom_params: Any) -> RequestSettings:
    """Settings of a request as its user wrote them.

    Raises:
        ValueError: the setting, its value and what is allowed.
    """
    if custom_params is None:
        return RequestSettings()
    if not isinstance(custom_params, Mapping):
        raise ValueError(f"custom_params must be a mapping, got {type(custom_params).__name__}")
    data = custom_params.get(KEY)
    if data is None:
        return RequestSettings()
    allowed = ", ".join(RequestSettings.model_fields)
    if not isinstance(data, Mapping):
        raise ValueError(
            f"custom_params.{KEY} must be a mapping with any of {allowed}, got {type(data).__name__}"
        )
    try:
        return RequestSettings.model_validate(dict(data))
    except ValidationError as error:
        raise ValueError(_explain(error, allowed)) from error


def _explain(error: ValidationError, allowed: str) -> str:
    lines = []
    for item in error.errors():
        where = ".".join((f"custom_params.{KEY}", *map(str, item["loc"])))
        if item["type"] == "extra_forbidden":
            lines.append(f"{where} is unknown; allowed are {allowed}")
        elif item["type"] == "string_pattern_mismatch":
            lines.append(
                f"{where} {item['input']!r} is no label: use 1 to 64 letters, digits and ._:@/-, and begin "
                "with a letter or digit"
            )
        else:
            lines.append(f"{where}: {item['msg']} (got {item['input']!r})")
    return "; ".join(lines)


def check_request(params: Any, *_: Any, **__: Any) -> None:
    """Before ``SamplingParams.verify``, which runs once per prompt in the process that answers HTTP.

    Refuses what is wrong, and gives the ``n`` samples of one prompt a label of their own where groups share.

    Raises:
        ValueError: as :func:`parse_settings`; SGLang answers with status 400.
    """
    settings = parse_settings(params.custom_params)
    _check_block_size(settings)
    if params.n > 1 and settings.group is None and current_config().graft.table.scope == "group":
        mine = settings.model_dump(exclude_defaults=True) | {"group": _SAMPLES + uuid.uuid4().hex}
        params.custom_params = {**(params.custom_params or {}), KEY: mine}


def _check_block_size(settings: RequestSettings) -> None:
    """Sizes above the server's are refused; other algorithms have no block to size, and do not look."""
    from ..algorithms import selected_algorithm

    if settings.block_size is None or selected_algorithm() != "BLOCKPILOT":
        return
    from sglang.srt.runtime_context import get_spec

    largest = get_spec().speculative_num_draft_tokens
    if settings.block_size > largest:
        raise ValueError(
            f"custom_params.{KEY}.block_size is {settings.block_size}, but this server's blocks have at most "
            f"{largest} rows (--speculative-num-draft-tokens)"
        )


def settings_of(custom_params: Any) -> RequestSettings:
    """Settings of a request in the scheduler, where they were checked already.

    A request that came in some other way with settings that make no sense is kept out of the table.
    """
    data = custom_params.get(KEY) if isinstance(custom_params, Mapping) else None
    group = data.get("group") if isinstance(data, Mapping) else None
    try:
        if isinstance(data, Mapping) and isinstance(group, str) and group.startswith(_SAMPLES):
            own = parse_settings({KEY: {key: value for key, value in data.items() if key != "group"}})
            return own.model_copy(update={"group": group})
        return parse_settings(custom_params)
    except ValueError as error:
        logger.warning("GRAFT leaves a request out of its table: %s", error)
        return RequestSettings(enabled=False)
