"""Static buffers of a captured chain, and the rule that padding is reset before every replay.

A graph is captured for a fixed batch; with fewer live requests the remaining rows still run. Whatever an
earlier batch left there would be read again, so `load` both copies the live rows and resets the others, and
it is the only way to get the ticket that `CapturedGraph.replay` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .eagle_tree import DraftPool

Result = TypeVar("Result")

NO_TABLE = -1  # a table index that reads as table 0 and writes nothing
NO_TOKEN = -1


@dataclass(frozen=True)
class ChainInputs:
    """One batch of live requests; the pool is absent when the chain runs inside the draft's own graph."""

    root_tokens: Tensor  # [live] int64, last committed token
    contexts: Tensor  # [live] int64, what stands before it, -1 when nothing is known
    table_index: Tensor  # [live] int64
    seq_lens: Tensor  # [live] int64
    pool: DraftPool | None = None  # tensors of [live, pool]


@dataclass(frozen=True)
class Loaded:
    """Proof that the live rows were copied and the padding reset; good for one replay."""

    live: int
    serial: int


@dataclass
class GraftBuffers:
    """Every static input of a captured chain."""

    root_tokens: Tensor  # [max_batch] int64
    contexts: Tensor  # [max_batch] int64
    table_index: Tensor  # [max_batch] int64
    seq_lens: Tensor  # [max_batch] int64
    pool: DraftPool  # tokens, parents int64 and scores float32, each [max_batch, pool]
    _serial: int = field(default=0, init=False)

    @classmethod
    def create(cls, max_batch: int, pool_size: int = 0, device: torch.device | str = "cpu") -> GraftBuffers:
        """Allocate the buffers with every row padding. A pool size of 0 leaves the pool to the caller."""

        def integers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.long, device=device)

        pool_shape = (max_batch, pool_size)
        scores = torch.empty(pool_shape, dtype=torch.float32, device=device)
        pool = DraftPool(integers(*pool_shape), integers(*pool_shape), scores)
        rows = [integers(max_batch) for _ in range(4)]
        buffers = cls(rows[0], rows[1], rows[2], rows[3], pool)
        buffers.reset_padding(0)
        return buffers

    @property
    def max_batch(self) -> int:
        return self.root_tokens.shape[0]

    def reset_padding(self, live: int) -> None:
        """Give every row from `live` on the neutral values: a lone root, no table, no draft."""
        self.root_tokens[live:] = 0
        self.contexts[live:] = NO_TOKEN
        self.table_index[live:] = NO_TABLE
        self.seq_lens[live:] = 1
        self.pool.tokens[live:] = 0
        self.pool.parents[live:] = -1
        self.pool.scores[live:] = 0.0

    def load(self, inputs: ChainInputs) -> Loaded:
        """Copy a batch into the first rows and reset the rest. Earlier tickets become void.

        Raises ValueError when the batch is larger than the buffers or its pool does not fit them.
        """
        live = inputs.root_tokens.shape[0]
        if live > self.max_batch:
            raise ValueError(
                f"{live} requests do not fit buffers for {self.max_batch}: capture a larger batch"
            )
        pool_size = 0 if inputs.pool is None else inputs.pool.tokens.shape[1]
        if pool_size != self.pool.tokens.shape[1]:
            raise ValueError(
                f"a pool of {pool_size} nodes does not fit buffers for {self.pool.tokens.shape[1]}"
            )
        self.root_tokens[:live].copy_(inputs.root_tokens)
        self.contexts[:live].copy_(inputs.contexts)
        self.table_index[:live].copy_(inputs.table_index)
        self.seq_lens[:live].copy_(inputs.seq_lens)
        if inputs.pool is not None:
            for buffer, rows in zip(self.pool, inputs.pool, strict=True):
                buffer[:live].copy_(rows)
        self.reset_padding(live)
        self._serial += 1
        return Loaded(live, self._serial)

    def redeem(self, loaded: Loaded) -> int:
        """Accept a ticket once and return its number of live rows. Raises RuntimeError for a void one."""
        if loaded.serial != self._serial:
            raise RuntimeError(
                "these inputs were replayed already or replaced: load the batch before each replay"
            )
        self._serial += 1
        return loaded.live


class CapturedGraph(Generic[Result]):
    """A function over static buffers: captured as a CUDA graph, or called anew on other devices."""

    def __init__(self, buffers: GraftBuffers, run: Callable[[], Result]) -> None:
        """Warm up and capture `run`, which may read nothing but static tensors."""
        self._buffers = buffers
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        if buffers.root_tokens.is_cuda:
            self._graph, self._result = _capture(run)

    def replay(self, loaded: Loaded) -> tuple[Result, int]:
        """Run once over what was loaded; returns the static result and how many of its rows are live."""
        live = self._buffers.redeem(loaded)
        if self._graph is None:
            return self._run(), live
        self._graph.replay()
        return self._result, live


def _capture(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture after a warm-up on a side stream, where kernels are compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result
