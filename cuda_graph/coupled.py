"""Walk a verified tree by equality: a child is accepted when it is the token the target drew at its parent.

For T = 0 the drawn token is the argmax, and this is SGLang's greedy verify. For T > 0 the caller draws one
token per node with noise keyed by (seed, position) alone (coupled sampling); then the accepted path is the
very sequence plain decoding would have produced, whatever the tree was. Output conventions are those of
`verify_tree_greedy`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import host_op, use_triton


class AcceptedPath(NamedTuple):
    """The accepted path of every request, in SGLang's layout."""

    predicts: Tensor  # [batch * slots] int32, token committed after each accepted slot, 0 elsewhere
    accept_index: Tensor  # [batch, max_path] int32, flat verify row per accepted slot, -1 padded
    num_correct_drafts: Tensor  # [batch] int32, accepted slots without the root
    bonus_tokens: Tensor  # [batch] int64, the target's token after the last accepted slot


def walk_accepted(
    tokens: Tensor,  # [batch, slots] int64
    parents: Tensor,  # [batch, slots] int64
    target_tokens: Tensor,  # [batch, slots] int64, the target's token after each slot
    max_path: int,  # longest path, root included: SGLang's max_tree_depth
) -> AcceptedPath:
    """Follow the target's tokens from the root while the tree holds them, for at most `max_path - 1` drafts.

    Among siblings with the same token the first slot wins. Raises ValueError when `max_path` is below 1.
    """
    if max_path < 1:
        raise ValueError(f"max_path counts the root and must be at least 1, not {max_path}")
    if use_triton(tokens):
        from .coupled_kernel import walk_accepted_triton

        return walk_accepted_triton(tokens, parents, target_tokens, max_path)
    return host_op(walk_accepted_torch)(tokens, parents, target_tokens, max_path)


def walk_accepted_torch(
    tokens: Tensor,  # [batch, slots] int64
    parents: Tensor,  # [batch, slots] int64
    target_tokens: Tensor,  # [batch, slots] int64
    max_path: int,
) -> AcceptedPath:
    """Reference of `walk_accepted`."""
    slot = torch.arange(tokens.shape[1], device=tokens.device)
    child_of = torch.where(slot > 0, parents, -1)  # [batch, slots]
    current = torch.zeros_like(tokens[:, :1])  # [batch, 1], the last accepted slot
    alive = torch.ones_like(current, dtype=torch.bool)  # [batch, 1]
    path = [current]
    for _ in range(max_path - 1):
        wanted = target_tokens.gather(1, current)  # [batch, 1]
        matches = (child_of == current) & (tokens == wanted) & alive  # [batch, slots]
        alive = matches.any(1, keepdim=True)
        first = matches.view(torch.uint8).argmax(1, keepdim=True)  # argmax takes the first of equals
        current = torch.where(alive, first, current)
        path.append(torch.where(alive, first, -1))
    accepted = torch.cat(path, dim=1)  # [batch, max_path], slots of the path, -1 padded
    return _in_sglang_layout(accepted, current, target_tokens)


def _in_sglang_layout(
    accepted: Tensor,  # [batch, max_path] int64
    last: Tensor,  # [batch, 1] int64
    target_tokens: Tensor,  # [batch, slots] int64
) -> AcceptedPath:
    batch, slots = target_tokens.shape
    on_path = accepted >= 0  # [batch, max_path]
    # Padding is redirected to the last accepted slot, which is on the path anyway.
    path = torch.where(on_path, accepted, last)
    predicts = torch.zeros_like(target_tokens).scatter(1, path, target_tokens.gather(1, path))
    first_row = torch.arange(0, batch * slots, slots, device=last.device).unsqueeze(1)
    return AcceptedPath(
        predicts=predicts.flatten().to(torch.int32),
        accept_index=torch.where(on_path, accepted + first_row, -1).to(torch.int32),
        num_correct_drafts=(on_path.sum(1) - 1).to(torch.int32),
        bonus_tokens=target_tokens.gather(1, last).squeeze(1),
    )


def parents_from_links(
    retrieve_next_token: Tensor,  # [batch, slots] int64
    retrieve_next_sibling: Tensor,  # [batch, slots] int64
) -> Tensor:  # [batch, slots] int64
    """Recover `parents` from retrieve links, for callers that hold only those (stock SGLang trees)."""
    return host_op(parents_from_links_torch)(retrieve_next_token, retrieve_next_sibling)


def parents_from_links_torch(
    retrieve_next_token: Tensor,  # [batch, slots] int64
    retrieve_next_sibling: Tensor,  # [batch, slots] int64
) -> Tensor:  # [batch, slots] int64
    """Reference of `parents_from_links`.

    Each slot knows its previous sibling or its parent; pointer doubling over the sibling chains finds the
    parent.
    """
    slots = retrieve_next_token.shape[1]
    slot = torch.arange(slots, device=retrieve_next_token.device)
    points_at = retrieve_next_token.unsqueeze(2) == slot  # [batch, parent, first child]
    parents = torch.where(points_at, slot.unsqueeze(1), -1).amax(1)  # [batch, slots], of first children
    follows = retrieve_next_sibling.unsqueeze(2) == slot  # [batch, slot, next sibling]
    jumps = torch.where(follows, slot.unsqueeze(1), -1).amax(1)  # [batch, slots], previous sibling
    jumps = torch.where(jumps < 0, slot, jumps)
    for _ in range((slots - 1).bit_length()):
        parents = torch.maximum(parents, parents.gather(1, jumps))
        jumps = jumps.gather(1, jumps)
    return parents
