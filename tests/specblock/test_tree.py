"""The tree rule: properties on random proposals, the branching table, duplicates, brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_graft.specblock.tree import BranchRule, Nodes, Proposals, TreeGrower, VerifyTree, best_tree_torch

K, WIDTH = 4, 6


def proposals(batch: int, leaves: int, seed: int, vocab: int = 9) -> Proposals:
    """Random proposals over few tokens, so that blocks propose the same again and again."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, leaves, K, WIDTH, generator=random)
    log_probs = (scores / scores.sum(-1, keepdim=True)).sort(-1, descending=True).values.log()
    tokens = torch.stack(
        [torch.randperm(vocab, generator=random)[:WIDTH] for _ in range(batch * leaves * K)]
    ).view(batch, leaves, K, WIDTH)
    return Proposals(tokens, log_probs, torch.randint(0, 4, (batch, leaves, K), generator=random))


def grow(rule: BranchRule, seed: int, blocks: int, leaves: int, slots: int) -> tuple[TreeGrower, VerifyTree]:
    grower = TreeGrower(rule)
    grower.add(proposals(3, 1, seed))
    for block in range(1, blocks):
        chosen = grower.leaves(leaves)
        grower.add(proposals(3, chosen.nodes.shape[1], seed + 100 * block), chosen)
    return grower, grower.finish(torch.arange(50, 53), slots)


def path(tokens: list[int], parents: list[int], node: int) -> tuple[int, ...]:
    walked: list[int] = []
    while node > 0:
        walked.append(tokens[node])
        node = parents[node]
    return tuple(reversed(walked))


RULE = BranchRule(children=(2, 4, 6, 4), beam=5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), blocks=st.integers(1, 3), leaves=st.integers(1, 6), slots=st.integers(2, 24)
)
def test_trees_are_sound_and_hold_the_likeliest_paths(
    seed: int, blocks: int, leaves: int, slots: int
) -> None:
    grower, tree = grow(RULE, seed, blocks, leaves, slots)
    assert tree.tokens.shape == tree.parents.shape == (3, slots)
    candidates = [torch.cat(part, dim=1).tolist() for part in (grower.tokens, grower.parents, grower.scores)]
    for row in range(3):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        assert tokens[0] == 50 + row and parents[0] == -1
        live = [i for i in range(1, slots) if parents[i] >= 0]
        assert live == list(range(1, len(live) + 1)), "empty slots come last"
        assert all(parents[i] < i for i in live)
        siblings = [(parents[i], tokens[i]) for i in live]
        assert len(set(siblings)) == len(siblings)

        best: dict[tuple[int, ...], float] = {}
        paths: list[tuple[int, ...]] = []
        for token, parent, score in zip(*(part[row] for part in candidates), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            if score > -1e30:
                best[paths[-1]] = max(best.get(paths[-1], -1e30), score)
        got = [path(tokens, parents, i) for i in live]
        assert set(got) <= set(best)
        scores = sorted(best.values(), reverse=True)[: slots - 1]
        # Copies can push distinct paths out of the candidates looked at, so fewer may be there, never worse.
        for have, want in zip((best[p] for p in got), scores, strict=False):
            assert have == pytest.approx(want, abs=1e-5)
        if len(best) * 2 < 4 * slots:
            assert len(got) == min(slots - 1, len(best))


def one_chain(classes: list[int]) -> Proposals:
    """Proposals with all tokens distinct: slot k proposes 10 k, 10 k + 1, ..."""
    tokens = (torch.arange(K).unsqueeze(1) * 10 + torch.arange(WIDTH)).view(1, 1, K, WIDTH)
    log_probs = torch.log(torch.tensor([0.5, 0.2, 0.1, 0.08, 0.07, 0.05])).expand(1, 1, K, WIDTH)
    return Proposals(tokens, log_probs, torch.tensor(classes).view(1, 1, K))


def behind(leaves: int) -> Proposals:
    """The same proposals for each of some leaves, with other tokens than block 1's."""
    block = one_chain([0, 0, 0, 0])
    return Proposals(
        block.tokens.expand(1, leaves, K, WIDTH) + 50,
        block.log_probs.expand(1, leaves, K, WIDTH),
        block.classes.expand(1, leaves, K),
    )


@pytest.mark.parametrize(
    ("classes", "children", "nodes", "starts"),
    [
        ([0, 1, 2, 3], (2, 4, 6, 4), [3, 4, 6, 4], [0, 1, 2, 3]),
        ([0, 0, 0, 0], (1, 4, 6, 4), [3, 1, 1, 1], [0, 3]),
        ([1, 0, 3, 1], (1, 4, 6, 0), [3, 1, 1, 1], [0]),
        ([1, 1, 1, 3], (1, 4, 6, 0), [3, 4, 4, 1], [0, 1, 2]),
        ([3, 3, 0, 0], (2, 4, 6, 0), [3, 1, 1, 1], [0]),
    ],
)
def test_table_sets_children_and_starts(
    classes: list[int], children: tuple[int, int, int, int], nodes: list[int], starts: list[int]
) -> None:
    """The likeliest proposal is always a node; slots that branch, and the last, start the next block."""
    grower = TreeGrower(BranchRule(children=children, beam=3))
    grower.add(one_chain(classes))
    there = (grower.scores[0][0].view(K, WIDTH) > -1e30).sum(1)
    assert there.tolist() == nodes
    leaves = grower.leaves(40)
    slots = leaves.slot[0][leaves.scores[0] > -1e30]
    assert sorted(set(slots.tolist())) == starts
    for slot in starts:
        assert int((slots == slot).sum()) == nodes[slot], "a start slot continues at each of its nodes"


def test_sure_slots_are_spared() -> None:
    sure = one_chain([1, 1, 1, 1])
    log_probs = torch.log(torch.tensor([0.9, 0.96, 0.86, 0.5])).view(1, 1, K, 1).expand(1, 1, K, WIDTH)
    grower = TreeGrower(BranchRule(children=(6, 6, 6, 6), beam=6, spare_sure=True))
    grower.add(sure._replace(log_probs=log_probs))
    assert (grower.scores[0][0].view(K, WIDTH) > -1e30).sum(1).tolist() == [3, 2, 3, 6]


def test_leaves_are_the_likeliest_nodes_and_say_where_they_hang() -> None:
    grower = TreeGrower(BranchRule(children=(2, 2, 2, 2), beam=2))
    grower.add(one_chain([0, 0, 0, 0]))
    leaves = grower.leaves(3)
    assert leaves.tokens.tolist() == [[0, 10, 1]]
    assert leaves.slot.tolist() == [[0, 1, 0]]
    torch.testing.assert_close(leaves.scores, torch.log(torch.tensor([[0.5, 0.25, 0.2]])))
    grower.add(behind(3), leaves)
    tree = grower.finish(torch.tensor([99]), 16)
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    paths = {path(tokens, parents, i) for i in range(1, 16)}
    assert (0, 50) in paths and (0, 10, 50) in paths and (1, 50) in paths
    again = grower.leaves(2)
    # Behind leaf 0: 0.5 * 0.5; then a tie of its second slot and of leaf 1's first, 0.125 each.
    assert again.source.tolist() == [[0, 0]] and again.slot.tolist() == [[0, 1]]
    assert grower.leaves(3).source.tolist() == [[0, 0, 1]]


def test_copies_merge_with_their_descendants() -> None:
    """Two ways to the same path are one node; what hangs below either hangs below the one."""
    tokens = torch.tensor([[7, 8, 7, 8, 9]])
    parents = torch.tensor([[-1, 0, -1, 2, 3]])  # 7 > 8, and again 7 > 8 > 9
    scores = torch.tensor([[-1.0, -2.0, -1.5, -2.5, -3.0]])
    tree = best_tree_torch(tokens, parents, scores, torch.tensor([1]), 6, 3)
    assert tree.tokens.tolist() == [[1, 7, 8, 9, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, -1, -1]]


def test_other_nodes_compete_and_merge() -> None:
    """A likelier path from elsewhere takes slots; one the draft has too is one node with both's children."""
    grower = TreeGrower(BranchRule(children=(1, 1, 1, 1), beam=2))
    grower.add(one_chain([0, 0, 0, 0]))  # 0 (0.5) > 10 (0.25) > 20 > 30, and 1 (0.2)
    others = Nodes(
        torch.tensor([[0, 77, 78, 5]]),
        torch.tensor([[-1, 0, 1, -1]]),
        torch.log(torch.tensor([[0.4, 0.3, 0.28, 0.0]])),
        3,
    )
    grower.join(others)
    tree = grower.finish(torch.tensor([99]), 6)
    assert tree.tokens.tolist() == [[99, 0, 77, 78, 10, 1]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 1, 0]]


def test_certain_paths_keep_parents_first() -> None:
    """Probability 1 all along: every score ties, and the order must still be a tree's."""
    sure = one_chain([0, 0, 0, 0])
    log_probs = torch.full((1, 1, K, WIDTH), -50.0)
    log_probs[..., 0] = 0.0
    grower = TreeGrower(BranchRule(children=(1, 1, 1, 1), beam=1))
    grower.add(sure._replace(log_probs=log_probs))
    tree = grower.finish(torch.tensor([99]), 8)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, -1, -1, -1]]
    assert tree.tokens.tolist() == [[99, 0, 10, 20, 30, 0, 0, 0]]


def test_absent_leaves_add_nothing() -> None:
    grower = TreeGrower(BranchRule(children=(1, 1, 1, 1), beam=1))
    grower.add(one_chain([0, 0, 0, 0]))
    leaves = grower.leaves(4)
    assert (leaves.scores[0] > -1e30).tolist() == [True, False, False, False]
    grower.add(behind(4), leaves)
    tree = grower.finish(torch.tensor([99]), 32)
    assert int((tree.parents[0] >= 0).sum()) == 2 * K
