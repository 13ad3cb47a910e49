"""Count the operations that a captured graph cannot hold: host reads, data-dependent shapes, Python data.

    with HostReadCounter() as counter:
        chain(...)
    assert not counter.reads

It sees every torch operation below autograd, whatever device it runs on, so a CPU test proves the chain's
torch side sync-free. A Triton kernel cannot read to the host at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that return a Python number or a tensor whose shape depends on values, or take Python values.
READS = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::argwhere",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::bincount",
    "aten::repeat_interleave",
    "aten::lift_fresh",  # torch.tensor(values): a copy from the host, which a capture refuses
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
COPIES = {"aten::_to_copy", "aten::copy_"}


class HostReadCounter(TorchDispatchMode):
    """Lists every host read made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in READS or (name in INDEXING and _has_mask(args[1])):
            self.reads.append(name)
        result = func(*args, **(kwargs or {}))
        if name in COPIES and _leaves_the_device(args, result):
            self.reads.append(f"{name} to the host")
        return result


def count_host_reads(run: Callable[[], Any]) -> list[str]:
    """The host reads made by `run`."""
    with HostReadCounter() as counter:
        run()
    return counter.reads


def _has_mask(indices: Any) -> bool:
    """Indexing with a bool or uint8 tensor looks up how many entries are set."""
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _leaves_the_device(args: tuple[Any, ...], result: torch.Tensor) -> bool:
    source = args[-1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
    return result.device.type == "cpu" and source.device.type != "cpu"
