"""The engine's tree builders, around which a grafted tree takes the place of the drafted one.

The engine calls them as plain functions, without the worker they run for; `growing` says which one it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from ..cuda_graph.eagle_tree import draft_pool
from ..cuda_graph.tree_links import TreeMaskMode, tree_links

if TYPE_CHECKING:
    from .worker import GraftDraftWorker

_current: GraftDraftWorker | None = None


@contextlib.contextmanager
def growing(worker: GraftDraftWorker) -> Iterator[None]:
    """Trees built inside this block are this worker's."""
    global _current
    former, _current = _current, worker
    try:
        yield
    finally:
        _current = former


@dataclasses.dataclass(frozen=True)
class RoundTree:
    """The tree in flight between draft and commit."""

    parents: torch.Tensor  # [batch, slots]
    depths: torch.Tensor  # [batch, slots]
    sources: torch.Tensor  # [batch, slots]
    stage: torch.Tensor  # [batch]

    @classmethod
    def lone_roots(cls, rows: torch.Tensor) -> RoundTree:  # [batch]
        """Trees of one slot, for a round without a draft."""
        nothing = torch.zeros((len(rows), 1), dtype=torch.int64, device=rows.device)
        return cls(nothing - 1, nothing, nothing, nothing[:, 0])


class GraftVerifyInput(EagleVerifyInput):
    """A verify input whose tree may be deeper than the draft and has no fixed branching."""

    max_path: int = 0

    @property
    def max_tree_depth(self) -> int:
        return self.max_path

    @property
    def tree_topk(self) -> int:
        return -1


def deeper(verify_input: EagleVerifyInput, max_path: int) -> GraftVerifyInput:
    """The same verify input, for trees of other depth."""
    values = {field.name: getattr(verify_input, field.name) for field in dataclasses.fields(verify_input)}
    graft = GraftVerifyInput(**values)
    graft.max_path = max_path
    return graft


def watch_level(
    original: Callable[..., Any],
    i: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around ``select_top_k_tokens``, which the draft loop calls once per level, with the level's scores."""
    result = original(i, *args, **kwargs)
    if _current is not None:
        _current.level_drafted(i, *result[3])
    return result


def organize(
    original: Callable[..., Any],
    score_list: list[torch.Tensor],
    token_list: list[torch.Tensor],
    parents_list: list[torch.Tensor],
    num_draft_token: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Around ``organize_draft_results``: the last step of the draft, inside the captured graph.

    The engine carries three tensors from here to :func:`build_tree`; they hold the grafted tree's parents
    [batch, slots], its notes [batch, slots, 3] (depth, source, stage) and its tokens [batch, slots - 1].
    """
    if _current is None:
        return original(score_list, token_list, parents_list, num_draft_token)
    tree, stage = _current.grown(draft_pool(score_list, token_list, parents_list))
    notes = torch.stack((tree.depths, tree.sources, stage.unsqueeze(1).expand_as(tree.depths)), dim=2)
    return tree.parents, notes, tree.tokens[:, 1:]


def build_tree(
    original: Callable[..., Any],
    bonus_tokens: torch.Tensor,  # [batch]
    parents: torch.Tensor,  # [batch, slots], from `organize`
    notes: torch.Tensor,  # [batch, slots, 3], from `organize`
    draft_tokens: torch.Tensor,  # [batch, slots - 1]
    seq_lens: torch.Tensor,  # [batch]
    seq_lens_sum: int,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any = 0,
    tree_mask_buf: torch.Tensor | None = None,
    fill_prefix_mask: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Around ``build_tree_kernel_efficient``: mask, positions and links of the grafted tree."""
    if _current is None:
        return original(
            bonus_tokens, parents, notes, draft_tokens, seq_lens, seq_lens_sum, topk, spec_steps,
            num_verify_tokens, tree_mask_mode, tree_mask_buf, fill_prefix_mask,
        )  # fmt: skip
    _current.tree = RoundTree(parents, notes[:, :, 0], notes[:, :, 1], notes[:, 0, 2])
    mode = TreeMaskMode(int(tree_mask_mode))
    if mode == TreeMaskMode.FULL_MASK and tree_mask_buf is None:
        batch = seq_lens.numel()
        cells = seq_lens_sum * num_verify_tokens + batch * num_verify_tokens**2
        tree_mask_buf = torch.empty(cells, dtype=torch.bool, device=seq_lens.device)
    with _current.graft.clock("links"):
        links = tree_links(parents, seq_lens.long(), mode, tree_mask_buf, fill_prefix_mask)
    tokens = torch.cat((bonus_tokens.unsqueeze(1), draft_tokens), dim=1).flatten()
    mask = links.tree_mask if tree_mask_buf is None else tree_mask_buf
    return (mask, *links[1:], tokens)
