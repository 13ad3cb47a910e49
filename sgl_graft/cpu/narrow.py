"""Draft weights read in bf16 where that holds every value of them exactly.

A draft is trained and stored in bf16 and served in the target's fp32, so half of every weight that a draft
step fetches from memory is zeros. The products are those of the fp32 weight to the last bit. Drafts only: an
update of the weight is noticed by a few probed values, and a target's output may not depend on a probe.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import kernels
from .library import function

ATTRIBUTE = "graft_narrow"  # of a layer: its weight's exact copy


def narrow_copy(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in bf16, if that holds every value of it."""
    if weight.dtype != torch.float32 or not weight.is_contiguous() or not kernels.available(weight.dtype):
        return None
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.float(), weight) else None


def attach_copies(layers: Iterable[torch.nn.Module]) -> None:
    """Give each of these linear layers its copy, where there is one."""
    for layer in layers:
        copy = narrow_copy(layer.weight.detach())  # type: ignore[operator]
        if copy is not None:
            layer.__dict__[ATTRIBUTE] = copy  # past nn.Module's bookkeeping: it is no parameter of the model


def linear(
    x: torch.Tensor,  # [rows, k] fp32
    weight: torch.Tensor,  # [n, k] fp32
    narrow: torch.Tensor,  # [n, k] bf16, the weight's copy
    bias: torch.Tensor | None = None,  # [n]
) -> torch.Tensor:  # [rows, n]
    """``kernels.linear`` over the copy, or over the weight itself where it was updated since."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, width), columns = x.shape, weight.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype)
    function("graft_linear_narrow", "pipppp" + "iiii")(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        narrow.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        columns,
        rows,
        columns,
        width,
    )
    return out
