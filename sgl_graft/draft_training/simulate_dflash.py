"""Accept length of a DFlash draft without a server: greedy, one dialogue at a time.

A block depends on the features before its anchor only, and a greedy answer is known beforehand: the blocks of
all anchors are computed at once, then the rounds that serving would run are walked through them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_graft.draft_training.dflash import Blocks, DFlashDraft
from sgl_graft.draft_training.features import Sample

_BLOCKS = 64  # drafted at once: their logits are the largest tensor here


@torch.no_grad()
def accept_lengths(
    draft: DFlashDraft, embedding: Tensor, head: Tensor, sample: Sample, size: int
) -> list[int]:
    """Tokens committed by each verify of the answer in `sample` (greedy, one turn), bonus included.

    embedding and head `[vocab, hidden]` are the target's. The token that the prefill yields is not counted,
    and rounds so near the end that the known answer could cut them short are left out.
    """
    first = int(sample.rows[0]) + 1  # the prefill's token is the first anchor
    end = len(sample.ids) - size + 1
    if end <= first:
        return []
    anchors = torch.arange(first, end)
    correct = torch.cat([_correct(draft, embedding, head, sample, a, size) for a in anchors.split(_BLOCKS)])
    return walk(correct.tolist())


def walk(correct: Sequence[int]) -> list[int]:
    """Commit lengths of successive rounds, from the correct proposals of a block at every anchor."""
    lengths = []
    anchor = 0
    while anchor < len(correct):
        lengths.append(correct[anchor] + 1)
        anchor += lengths[-1]
    return lengths


def _correct(
    draft: DFlashDraft, embedding: Tensor, head: Tensor, sample: Sample, anchors: Tensor, size: int
) -> Tensor:
    """`[anchors]`: how many proposals of each block are right from its start on."""
    offsets = torch.arange(1, size)
    scored = (torch.arange(len(anchors))[:, None] * size + offsets).flatten()
    normed = draft([sample.ids], [sample.features], [Blocks(anchors, scored)], size, embedding)
    best = (normed.to(head.dtype) @ head.T).argmax(-1).view(len(anchors), size - 1)
    right = best == sample.ids[anchors[:, None] + offsets]
    return right.int().cumprod(-1).sum(-1)
