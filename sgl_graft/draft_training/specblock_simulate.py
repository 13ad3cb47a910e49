"""Accept length of a SpecBlock draft without a server; see `simulate`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_graft.draft_training.features import Sample
from sgl_graft.specblock.drafting import Drafter, DraftShape
from sgl_graft.specblock.model import head_dim
from sgl_graft.specblock.pool_attention import DraftPool
from sgl_graft.specblock.rounds import NewRows, TorchBlocks
from sgl_graft.specblock.tree import VerifyTree


@torch.no_grad()
def accept_lengths(drafter: Drafter, sample: Sample, shape: DraftShape) -> list[int]:
    """Tokens committed by each verify of the answer in `sample` (greedy, one turn), bonus included.

    The token that the prefill yields is not counted, and rounds so near the end that the known answer could
    cut them short are left out.
    """
    draft, ids = drafter.draft, sample.ids
    levels = shape.blocks * draft.block
    places = torch.arange(len(ids))
    heads = (len(ids), draft.block, draft.config.num_key_value_heads, head_dim(draft.config))
    pool = DraftPool([torch.zeros(heads) for _ in draft.layers], [torch.zeros(heads) for _ in draft.layers])
    blocks = TorchBlocks(draft, pool)
    features = sample.features.to(draft.norm.weight.dtype)
    row, committed = int(sample.rows[0]), 0  # the last position whose features are there; rows in the pool
    lengths = []
    while row + 2 + levels < len(ids):
        new = slice(committed, row + 1)
        rows = NewRows(places.unsqueeze(0), [row + 1], [row + 1 - committed])
        first = drafter.read(blocks.commit(rows, features[new], drafter.embed(ids[committed + 1 : row + 2])))
        behind = blocks.continuing(rows.slots, rows.lengths, planned=0)
        tree = drafter.tree(first, ids[row + 1 : row + 2], torch.tensor([row]), behind, shape)
        lengths.append(_walk(tree, ids[row + 2 : row + 2 + levels].tolist()) + 1)
        committed = row + 1
        row += lengths[-1]
    return lengths


def _walk(tree: VerifyTree, truth: Sequence[int]) -> int:
    """How many tokens of `truth` a tree of one request holds along one path."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    node = 0
    for depth, token in enumerate(truth):
        found = [i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == token]
        if not found:
            return depth
        node = found[0]
    return len(truth)
