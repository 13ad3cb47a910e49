"""Keeps keys out of what SGLang writes to its log and shows in ``GET /server_info``.

SGLang masks its watermark's keys in both with two functions; API keys pass through the same two as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

MASK = "<redacted>"
NAMES = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password"})
FLAGS = tuple("--" + name.replace("_", "-") for name in sorted(NAMES))


def mask_settings(result: Any, *_: Any, **__: Any) -> Any:
    """After ``redact_watermark_secrets``, which calls itself for whatever lies inside."""
    if isinstance(result, dict) and not NAMES.isdisjoint(result):
        return {key: MASK if key in NAMES and value else value for key, value in result.items()}
    return result


def mask_command_line(result: str, argv: Sequence[str], *_: Any, **__: Any) -> str:
    """After ``redact_watermark_command_line``."""
    for secret in secrets_in(argv):
        result = result.replace(secret, MASK)
    return result


def secrets_in(argv: Sequence[str]) -> list[str]:
    """The keys that a command line names."""
    found = [value for flag, value in itertools.pairwise(argv) if flag in FLAGS]
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if equals and flag in FLAGS:
            found.append(value)
    return [secret for secret in found if secret]


def masked(argv: Sequence[str]) -> list[str]:
    """A command line that may be shown."""
    secrets = secrets_in(argv)
    return [
        flag + equals + MASK if equals and flag in FLAGS else MASK if argument in secrets else argument
        for argument in argv
        for flag, equals, _ in (argument.partition("="),)
    ]
