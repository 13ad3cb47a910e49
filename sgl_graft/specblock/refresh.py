"""Which token each newly committed row is paired with after a verify (design note 5.3)."""

from __future__ import annotations

from torch import Tensor


def pairs_after_verify(committed: Tensor, last: Tensor, reference: bool = False) -> Tensor:
    """Token of every new row `[rows]`, request by request.

    committed `[rows]`: of each request the accepted drafts and the bonus, a_1 .. a_L, b; last `[batch]` where
    each request's last one stands. The rows' features are those of the root and of a_1 .. a_L, so row n
    belongs with token n, as in training.

    `reference` pairs them as the published code does, one token too far, the last one twice: only the last
    row's pair is right.
    """
    if not reference:
        return committed
    shifted = committed.roll(-1)
    shifted[last] = committed[last]
    return shifted
