"""Torch versions of the engine's small device ops around a speculative round.

Each stands where SGLang launches a Triton kernel and keeps that function's signature. ``*_loc`` are slots
of the KV pool; ``req_to_token`` [requests, positions] int32 maps a request's positions to slots.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from ..cuda_graph import tree_links as links_op


def tree_mask_mode() -> TreeMaskMode:
    """The CPU attention reads one [slots, slots] mask per request."""
    return TreeMaskMode.QLEN_ONLY


def _window(
    req_to_token: torch.Tensor,  # [requests, positions]
    req_pool_indices: torch.Tensor,  # [batch]
    start: torch.Tensor,  # [batch]
    width: int,
) -> torch.Tensor:  # [batch, width] int64
    columns = start.long().unsqueeze(1) + torch.arange(width, device=start.device)
    return req_to_token[req_pool_indices.long().unsqueeze(1), columns].long()


def assign_draft_cache_locs(
    req_pool_indices: torch.Tensor,  # [batch]
    req_to_token: torch.Tensor,  # [requests, positions]
    seq_lens: torch.Tensor,  # [batch]
    out_cache_loc: torch.Tensor,  # [batch * topk * num_cols], written
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Copy each request's draft slots, which start at its committed length."""
    assert positions is None and mrope is None, "positions are prepared in-kernel only on CUDA"
    window = _window(req_to_token, req_pool_indices, seq_lens, topk * num_cols)
    out_cache_loc.copy_(window.flatten())


def assign_extend_cache_locs_uniform(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
    **fused: Any,
) -> torch.Tensor:  # [batch * draft_token_num] int64
    """The verify window's slots: ``draft_token_num`` per request from ``start_offset``."""
    assert not any(value is not None for name, value in fused.items() if name != "page_size")
    return _window(req_to_token, req_pool_indices, start_offset, draft_token_num).flatten()


def speculative_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:  # [batch * draft_token_num] int64
    """Ragged windows ``[start, end)``, concatenated; the tail of the buffer stays 0."""
    out = torch.zeros(batch_size * draft_token_num, dtype=torch.int64)
    lens = (end_offset - start_offset).long()
    owner, column = _ragged(lens)
    row = req_pool_indices.long()[owner]
    out[: owner.numel()] = req_to_token[row, start_offset.long()[owner] + column].long()
    return out


def _ragged(lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Owner and offset of every element of concatenated runs of ``lens`` [batch]."""
    owner = torch.repeat_interleave(torch.arange(lens.numel()), lens)
    starts = torch.cumsum(lens, 0) - lens
    return owner, torch.arange(owner.numel()) - starts[owner]


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,  # [batch]
    req_to_token: torch.Tensor,  # [requests, positions], written
    start_offset: torch.Tensor,  # [batch]
    end_offset: torch.Tensor,  # [batch]
    out_cache_loc: torch.Tensor,  # [sum(end - start)]
    batch_size: int,
) -> None:
    """Write newly allocated slots into the request-to-slot map."""
    owner, column = _ragged((end_offset - start_offset).long())
    rows = req_pool_indices.long()[owner]
    columns = start_offset.long()[owner] + column
    req_to_token[rows, columns] = out_cache_loc[: owner.numel()].to(req_to_token.dtype)


def fill_front_out_cache_loc(
    accept_lens: torch.Tensor,  # [batch], bonus included
    out_cache_loc: torch.Tensor,  # [batch * slots]
    tgt_cache_loc: torch.Tensor,  # [batch * depth], written
) -> None:
    """The front slots of each verify window, as many as were accepted, packed together."""
    owner, column = _ragged(accept_lens.long())
    slots = out_cache_loc.numel() // accept_lens.numel()
    tgt_cache_loc[: owner.numel()] = out_cache_loc[owner * slots + column]


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor,  # [batch, depth] flat node indices, -1 padded
    out_cache_loc: torch.Tensor,  # [batch * slots]
    accept_out_cache_loc: torch.Tensor,  # [batch * depth], written
    size: int,
) -> None:
    """Slots of the accepted nodes, packed together in path order."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def fill_bonus_tokens(
    accept_tokens: torch.Tensor,  # [batch, depth]
    accept_lens: torch.Tensor,  # [batch], bonus included
    bonus_tokens: torch.Tensor,  # [batch], written
    accept_stride: int,
    batch_size: int,
) -> None:
    """The last token of each accepted run: the next round's root."""
    last = accept_lens.long().unsqueeze(1) - 1
    bonus_tokens.copy_(accept_tokens.view(batch_size, accept_stride).gather(1, last).squeeze(1))


def selected_parents(
    parent_list: torch.Tensor,  # [batch, expanded] pool index of each expanded node, -1 the root
    selected_index: torch.Tensor,  # [batch, slots - 1] pool index of each selected node, ascending
    topk: int,
) -> torch.Tensor:  # [batch, slots] slot of each slot's parent, -1 for the root and for a lost parent
    """EAGLE's pool indices as slots of the verify tree."""
    batch, num_selected = selected_index.shape
    group = selected_index // topk  # which expanded node a pool node hangs under; 0 is the root
    parent = (
        parent_list.gather(1, group.clamp(max=parent_list.shape[1] - 1)) if parent_list.shape[1] else group
    )
    same = selected_index.unsqueeze(1) == parent.unsqueeze(2)  # [batch, child, candidate]
    found = same.any(2)
    slot = torch.where(found, same.int().argmax(2) + 1, -1)
    parents = torch.full((batch, num_selected + 1), -1, dtype=torch.int64)
    parents[:, 1:] = torch.where(group == 0, 0, slot)
    return parents


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,  # [batch]
    tree_mask: torch.Tensor,  # flat, written
    positions: torch.Tensor,  # [batch * slots], written
    retrieve_index: torch.Tensor,  # [batch, slots], written, as are the next two
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: TreeMaskMode,
) -> None:
    """Mask, positions and links of EAGLE's own tree, through the one op that all trees use."""
    parents = selected_parents(parent_list, selected_index, topk)
    mode = links_op.TreeMaskMode(int(tree_mask_mode))
    links = links_op.tree_links(parents, seq_lens.long(), mode, mask_out=tree_mask)
    positions.copy_(links.positions)
    retrieve_index.copy_(links.retrieve_index)
    retrieve_next_token.copy_(links.retrieve_next_token)
    retrieve_next_sibling.copy_(links.retrieve_next_sibling)


def last_locations(
    req_to_token: torch.Tensor,  # [requests, positions]
    req_pool_indices: torch.Tensor,  # [batch]
    prefix_lens: torch.Tensor,  # [batch]
) -> torch.Tensor:  # [batch] slot of each request's last position, -1 where it has none
    """``get_last_loc``: where a page goes on, for pages of more than one token."""
    last = req_to_token[req_pool_indices.long(), (prefix_lens - 1).clamp(min=0).long()]
    return torch.where(prefix_lens > 0, last.to(prefix_lens.dtype), torch.full_like(prefix_lens, -1))
