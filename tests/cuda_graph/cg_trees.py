"""Random trees for the tests of cuda_graph, and plain-Python answers to compare the ops with."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

# The same examples every run, and no deadline: the core is shared.
property_test = settings(max_examples=50, deadline=None, derandomize=True)


@dataclass
class TreeBatch:
    tokens: Tensor  # [batch, slots] int64
    parents: Tensor  # [batch, slots] int64
    seq_lens: Tensor  # [batch] int64

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def slots(self) -> int:
        return self.tokens.shape[1]


@st.composite
def tree_batches(
    draw, max_batch: int = 4, max_slots: int = 12, vocab: int = 5, empties: bool = True
) -> TreeBatch:
    """Trees of any shape; few token ids, so that siblings often repeat a token."""
    batch, slots = draw(st.integers(1, max_batch)), draw(st.integers(1, max_slots))
    rng = random.Random(draw(st.integers(0, 2**31)))
    parents = [random_parents(rng, slots, empties) for _ in range(batch)]
    tokens = [[rng.randrange(vocab) for _ in range(slots)] for _ in range(batch)]
    seq_lens = [rng.randrange(0, 9) for _ in range(batch)]
    return TreeBatch(torch.tensor(tokens), torch.tensor(parents), torch.tensor(seq_lens))


def random_parents(rng: random.Random, slots: int, empties: bool = True) -> list[int]:
    """Parents before children; some slots empty; sometimes one long chain, sometimes one wide star."""
    parents, live = [-1], [0]
    shape = rng.choice(["any", "chain", "star"])
    for slot in range(1, slots):
        if empties and rng.random() < 0.2:
            parents.append(-1)
            continue
        parents.append({"any": rng.choice(live), "chain": live[-1], "star": 0}[shape])
        live.append(slot)
    return parents


def path_to_root(parents: list[int], slot: int) -> list[int]:
    """`slot`, its parent, and so on down to the root."""
    path = [slot]
    while path[-1] != 0:
        path.append(max(parents[path[-1]], 0))
    return path


def is_live(parents: list[int], slot: int) -> bool:
    return slot == 0 or parents[slot] >= 0
