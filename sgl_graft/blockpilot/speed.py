"""Expected tokens per round, and the block sizes and widths that are fastest by a cost table.

The model: offset ``j`` of a block is accepted with probability ``c_j`` once all before it were. So a block of
size ``b`` (root included) is expected to commit ``1 + c_1 + c_1 c_2 + ... + c_1 .. c_{b-1}`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expected_tokens(
    rates: Tensor,  # [n, b_max - 1] chance of each offset given the ones before it
) -> Tensor:  # [n, b_max] tokens committed by a block of size 1, 2, .., b_max
    survival = torch.cumprod(rates, dim=1)
    one = torch.ones_like(survival[:, :1])
    return torch.cumsum(torch.cat((one, survival), dim=1), dim=1)


def fastest_sizes(
    tokens: Tensor,  # [n, b_max] from `expected_tokens`
    sizes: Tensor,  # [sizes] int64, the sizes to choose from
    seconds: Tensor,  # [sizes] cost of a round at each size
    default: int,
) -> Tensor:  # [n] int32
    """The size with the most tokens per second of each request; ties go to the default."""
    rate = tokens[:, sizes - 1] / seconds
    best = rate.amax(dim=1, keepdim=True)
    is_default = (sizes == default).to(rate.dtype)
    # A tie is a difference that float32 sums cannot tell from none.
    tied = (rate >= best * (1 - 1e-6)).to(rate.dtype)
    return sizes[(tied * (1 + is_default)).argmax(dim=1)].to(torch.int32)


def fastest_width(
    tokens: Tensor,  # [n, b_max] of the running requests
    block_lens: Tensor,  # [n] int, size each request would like
    widths: Tensor,  # [widths] int64, rising
    seconds: Tensor,  # [widths] cost of a round of this batch at each width
) -> Tensor:  # [] int64
    """The load-aware cap: the width at which the whole batch commits the most tokens per second.

    A request verifies at most its own size, so a width beyond all of them only costs. The crossing moves to
    shorter blocks as the batch grows, because verifying more rows then costs more.
    """
    used = torch.minimum(block_lens.long().unsqueeze(1), widths)  # [n, widths]
    total = tokens.gather(1, used - 1).sum(dim=0)
    return widths[(total / seconds).argmax()]
