"""A hash that is the same in every process, for draws that every rank must make alike."""

from __future__ import annotations

import hashlib


def hash64(*parts: object) -> int:
    """A number in [0, 2**64) made of ``parts``."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
