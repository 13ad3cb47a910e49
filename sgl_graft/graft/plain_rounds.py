"""Rounds without speculation inside a speculative worker, and how the draft catches up with them.

A plain round verifies a lone root: one slot per request, no draft. What the draft would have read of it, the
target's hidden state and the token behind it, waits in buffers. Before the next whole tree, and whenever the
buffers are full, one draft extend reads all that waits, as if it had been accepted in one round. So the
draft's cache never has a hole, and plain rounds pay one draft extend for as many tokens as a tree has slots.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from ..cuda_graph.tree_links import TreeMaskMode, tree_links


class Waiting:
    """What the draft has not read yet, by row of the request pool.

    Args:
        num_rows: rows of the request pool.
        width: tokens that one draft extend can read per request.
        device: of the buffers.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device | str) -> None:
        self.width = width
        self._device = device
        self._counts = [0] * num_rows  # on the host: a plain round adds exactly one token per request
        self._tokens = torch.zeros((num_rows, width), dtype=torch.int64, device=device)
        self._hidden: torch.Tensor | None = None  # [rows, width, hidden], its width is known with the first

    def restart(self, row: int) -> None:
        """A prefill wrote the draft's cache of this row anew."""
        self._counts[row] = 0

    def counts(self, rows: list[int]) -> list[int]:
        return [self._counts[row] for row in rows]

    def add(
        self,
        rows: list[int],
        hidden: torch.Tensor,  # [batch, hidden] the target's states at the roots
        tokens: torch.Tensor,  # [batch] the tokens behind them
    ) -> None:
        """A plain round committed one token per request."""
        if self._hidden is None:
            shape = (*self._tokens.shape, hidden.shape[1])
            self._hidden = torch.zeros(shape, dtype=hidden.dtype, device=self._device)
        counts = self.counts(rows)
        assert max(counts) < self.width, "the draft catches up before the buffers overflow"
        at = (
            torch.tensor(rows, device=self._device),
            torch.tensor(counts, device=self._device),
        )
        self._hidden[at] = hidden
        self._tokens[at] = tokens.long()
        for row in rows:
            self._counts[row] += 1

    def take(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [batch * width, hidden] and tokens [batch * width], first come first; forgotten."""
        assert self._hidden is not None
        index = torch.tensor(rows, device=self._device)
        for row in rows:
            self._counts[row] = 0
        return self._hidden[index].flatten(0, 1), self._tokens[index].flatten()


def lone_roots(
    batch: Any, target_runner: Any, input_class: Any, mask_mode: Any, topk: int, device: Any
) -> Any:
    """The verify input of a plain round: each request's last token, and nothing below it."""
    roots = batch.spec_info.bonus_tokens
    seq_lens = batch.seq_lens.long()
    parents = torch.full((len(roots), 1), -1, dtype=torch.int64, device=device)
    owned = target_runner.attn_backend.verify_mask
    if owned is None:
        buffer, fill = None, True
    else:
        mask_mode, fill = owned.mode, owned.is_read
        buffer = owned.buffer if owned.fits(len(roots)) else None
    mode = TreeMaskMode(int(mask_mode))
    if mode == TreeMaskMode.FULL_MASK and buffer is None:
        cells = int(seq_lens.sum()) + len(roots)
        buffer = torch.empty(cells, dtype=torch.bool, device=device)
    links = tree_links(parents, seq_lens, mode, buffer, fill)
    return input_class(
        draft_token=roots,
        custom_mask=links.tree_mask if buffer is None else buffer,
        positions=links.positions,
        retrieve_index=links.retrieve_index,
        retrieve_next_token=links.retrieve_next_token,
        retrieve_next_sibling=links.retrieve_next_sibling,
        retrieve_cum_len=None,
        spec_steps=0,
        topk=topk,
        draft_token_num=1,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def catch_up(batch: Any, draft_worker: Any, waiting: Waiting, rows: list[int]) -> None:
    """Let the draft read what waits for ``rows``, the batch's; ``batch.spec_info`` then continues from there.

    A request for which nothing waits was just prefilled: it keeps its proposals, and what the extend writes
    for it lies behind its committed tokens, where the next draft writes anyway.
    """
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    device, width = batch.seq_lens.device, waiting.width
    counts = torch.tensor(waiting.counts(rows), device=device)  # [batch]
    hidden, tokens = waiting.take(rows)
    past = copy.copy(batch)
    past.seq_lens = batch.seq_lens - counts.to(batch.seq_lens.dtype)
    if batch.seq_lens_cpu is not None:
        past.seq_lens_cpu = batch.seq_lens_cpu - counts.cpu().to(batch.seq_lens_cpu.dtype)
        past.seq_lens_sum = int(past.seq_lens_cpu.sum())
    past.out_cache_loc = cache_locs.assign_extend_cache_locs_uniform_func(
        req_pool_indices=batch.req_pool_indices,
        req_to_token=draft_worker.req_to_token_pool.req_to_token,
        start_offset=past.seq_lens,
        batch_size=len(rows),
        draft_token_num=width,
        device=device,
    )
    extended = EagleDraftInput(bonus_tokens=batch.spec_info.bonus_tokens)
    result = SimpleNamespace(
        prepared_draft_extend_inputs=None,
        accept_lens=counts.clamp(min=1).to(torch.int32),
        next_token_ids=tokens,
        logits_output=SimpleNamespace(hidden_states=hidden),
        next_draft_input=extended,
        new_seq_lens=batch.seq_lens,
    )
    draft_worker._draft_extend_for_decode(past, result)
    current, has = batch.spec_info, (counts > 0).unsqueeze(1)  # [batch, 1]
    for name in ("topk_p", "topk_index", "hidden_states"):
        fresh, old = getattr(extended, name), getattr(current, name)
        if fresh is not None:
            setattr(current, name, torch.where(has, fresh, old.to(fresh.dtype)))
