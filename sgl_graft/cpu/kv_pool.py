"""The KV pool of the CPU platform: plain copies of rows where upstream launches a tiled Triton copy."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from .row_kernels import RowMover


class CpuKVPool(MHATokenToKVPool):
    """``MHATokenToKVPool`` whose rows are moved by the host."""

    _mover: RowMover | None = None

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Move rows ``src_loc`` [rows] of every layer to ``tgt_loc``; sources are read before any write."""
        buffers = (*self.k_buffer, *self.v_buffer)
        if self._mover is None and RowMover.fits(buffers):
            self._mover = RowMover(buffers)
        if self._mover is not None:
            self._mover.move(tgt_loc.long(), src_loc.long())
            return
        for buffer in buffers:
            buffer.index_copy_(0, tgt_loc, buffer.index_select(0, src_loc))


def room_for_drafts(extra: int) -> int:
    """Columns of the request-to-slot map beyond the context length.

    Runs after ``get_req_to_token_extra_context_len``, which leaves room for one round's slots where a decode
    reserves two rounds'. On a GPU the excess lands in the next request's row.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm is None:
        return extra
    return max(extra, get_alloc_reserve_per_decode())
