"""Trees of as many slots as a machine word has bits, one less and one more: nothing changes there."""

from __future__ import annotations

import pytest
import torch
from sgl_graft.cuda_graph.coupled import walk_accepted_torch
from sgl_graft.cuda_graph.tree_links import TreeMaskMode, tree_links_torch

from sgl_graft.cpu import kernels, tree_kernels

WIDTHS = (2, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def random_parents(slots: int, batch: int, gen: torch.Generator) -> torch.Tensor:
    """Trees with parents before children, some deep and some flat, and empty slots at the end."""
    parents = torch.full((batch, slots), -1, dtype=torch.int64)
    for row in range(batch):
        used = int(torch.randint(1, slots + 1, (1,), generator=gen))
        for slot in range(1, used):
            low = max(0, slot - 3) if row % 2 else 0
            parents[row, slot] = int(torch.randint(low, slot, (1,), generator=gen))
    return parents


def visible(parents: torch.Tensor) -> torch.Tensor:  # [batch, slots] -> [batch, slots, slots]
    """Which slots each slot attends to, by following parents one at a time."""
    batch, slots = parents.shape
    mask = torch.zeros((batch, slots, slots), dtype=torch.bool)
    for row in range(batch):
        for slot in range(slots):
            at = slot
            while at >= 0:
                mask[row, slot, at] = True
                at = int(parents[row, at]) if at else -1
    return mask


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("slots", WIDTHS)
def test_trees_of_widths_around_machine_words(slots: int, native: bool) -> None:
    gen = torch.Generator().manual_seed(slots)
    batch = 4
    parents = random_parents(slots, batch, gen)
    real = parents >= 0
    real[:, 0] = True
    link, walk = tree_links_torch, walk_accepted_torch
    if native:
        if not kernels.available(torch.float32):
            pytest.skip("no kernel library on this machine")
        link, walk = tree_kernels.links_of_tree, tree_kernels.walk_accepted
    links = link(parents, torch.tensor([9, 1, 30, 4]), TreeMaskMode.QLEN_ONLY, None)
    mask = links.tree_mask.view(batch, slots, slots)
    expected = visible(parents)
    assert torch.equal(mask[real], expected[real])

    # A target that goes along the deepest path of every tree: exactly that path is accepted.
    tokens = torch.arange(batch * slots).view(batch, slots)
    deepest = expected.sum(2).masked_fill(~real, 0).argmax(1)
    drawn = torch.full((batch, slots), 10**6)
    for row in range(batch):
        at = int(deepest[row])
        while at > 0:
            parent = int(parents[row, at])
            drawn[row, parent] = tokens[row, at]
            at = parent
    accepted = walk(tokens, parents, drawn, slots)
    for row in range(batch):
        path = expected[row, deepest[row]].nonzero()[:, 0]
        found = accepted.accept_index[row]
        assert (found[found >= 0] - row * slots).tolist() == path.tolist()
        assert torch.equal(links.positions.view(batch, slots)[row][real[row]], depths(expected, row, real))


def depths(mask: torch.Tensor, row: int, real: torch.Tensor) -> torch.Tensor:
    """Positions of a row's slots: the context, then one per level."""
    return (9, 1, 30, 4)[row] + mask[row].sum(1)[real[row]] - 1
