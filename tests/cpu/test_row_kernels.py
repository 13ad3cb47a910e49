"""Argmax, the best few, softmax and moved rows against torch."""

from __future__ import annotations

import pytest
import torch

from sgl_graft.cpu import row_kernels

from .compiler import needs_compiler

pytestmark = needs_compiler


def never(*_: object) -> None:
    raise AssertionError("this should have gone to the kernel")


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (16, 1000), (2, 49152)], ids=str)
def test_argmax_takes_the_first_of_equals(shape: tuple[int, int]) -> None:
    gen = torch.Generator().manual_seed(shape[1])
    x = torch.randint(-3, 4, shape, generator=gen).float()
    first = torch.where(x == x.amax(1, keepdim=True), torch.arange(shape[1]), shape[1]).amin(1)
    assert torch.equal(row_kernels.argmax(x), first)
    wide = torch.randn(shape[0], shape[1] + 5, generator=gen)[:, : shape[1]]
    assert torch.equal(row_kernels.argmax(wide), wide.argmax(1))
    assert torch.equal(row_kernels.argmax(wide.bfloat16()), wide.bfloat16().argmax(1))


def test_argmax_of_rows_with_nan_and_infinities() -> None:
    x = torch.randn(4, 200)
    x[0, 150], x[1, 9], x[2] = float("nan"), float("inf"), -float("inf")
    assert torch.equal(row_kernels.argmax(x), x.argmax(1))


@pytest.mark.parametrize("k", [2, 4, 10])
def test_fast_topk(k: int) -> None:
    x = torch.randn(8, 8192)
    values, ids = row_kernels.fast_topk(never, x, k, -1)
    wanted = torch.topk(x, k, dim=-1)
    assert torch.equal(values, wanted.values) and torch.equal(ids, wanted.indices)
    assert row_kernels.fast_topk(lambda *_: "stock", x, 1, -1) == "stock"
    assert row_kernels.fast_topk(lambda *_: "stock", x.double(), k, -1) == "stock"


def test_draft_probs() -> None:
    logits = torch.randn(5, 8195) * 6
    torch.testing.assert_close(row_kernels.draft_probs(never, logits, None, False), logits.softmax(1))
    assert row_kernels.draft_probs(lambda *_: "stock", logits, None, True) == "stock"


def test_rows_are_read_before_any_is_written() -> None:
    buffers = [torch.randn(10, 3, 4) for _ in range(3)]
    wanted = [buffer.clone() for buffer in buffers]
    to, source = torch.tensor([1, 2, 3, 0, 0]), torch.tensor([2, 1, 3, 0, 0])
    for buffer in wanted:
        buffer[to] = buffer[source]
    assert row_kernels.RowMover.fits(buffers)
    row_kernels.RowMover(buffers).move(to, source)
    assert all(torch.equal(*pair) for pair in zip(buffers, wanted, strict=True))
    assert not row_kernels.RowMover.fits([buffers[0], torch.randn(10, 3, 5)])
