"""Messages between server and learner: a JSON header and tensors, over a pipe."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch import Tensor

_SIZE = struct.Struct("<Q")
_TYPES = {"bf16": torch.bfloat16, "int64": torch.int64, "fp32": torch.float32}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
MOST_BYTES = 2**32  # of one part; more means that the stream is damaged


def send(stream: IO[bytes], header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write one message. Raises OSError when the other side is gone."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in (tensors or {}).items()}
    listed = [[name, _NAMES[t.dtype], list(t.shape)] for name, t in tensors.items()]
    head = json.dumps({"header": header, "tensors": listed}).encode()
    stream.write(_SIZE.pack(len(head)))
    stream.write(head)
    for tensor in tensors.values():
        stream.write(tensor.flatten().view(torch.uint8).numpy().data)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read one message. Raises EOFError at the end of the stream, ValueError for one that is damaged."""
    (size,) = _SIZE.unpack(_exactly(stream, _SIZE.size))
    message = json.loads(_exactly(stream, _checked(size)))
    tensors = {}
    for name, kind, shape in message["tensors"]:
        dtype, count = _TYPES[kind], 1
        for length in shape:
            count *= length
        data = _exactly(stream, _checked(count * dtype.itemsize))
        flat = torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(shape)
    return message["header"], tensors


def _checked(size: int) -> int:
    if not 0 <= size <= MOST_BYTES:
        raise ValueError(f"a message part of {size} bytes: the stream is damaged")
    return size


def _exactly(stream: IO[bytes], size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size:
        count = stream.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError("the other side closed the stream")
        filled += count
    return data
