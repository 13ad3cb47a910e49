"""The KV pool of the CPU platform: torch index copies where upstream launches a tiled Triton copy."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuKVPool(MHATokenToKVPool):
    """``MHATokenToKVPool`` whose row moves are plain torch."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Move rows ``src_loc`` [rows] of every layer to ``tgt_loc``; sources are read before any write."""
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer.index_copy_(0, tgt_loc, buffer.index_select(0, src_loc))
