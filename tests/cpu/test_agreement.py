"""Ranks that hold other data than rank 0 are noticed, whatever differs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sgl_graft.cuda_graph.tree_links import tree_links

from sgl_graft.cpu import verify
from sgl_graft.cpu.agreement import RankDisagreementError, follow_rank_0
from sgl_graft.cpu.verify import sample_and_walk

from .test_verify import FULL_PATH, PARENTS, SLOTS, TOKENS, greedy_info, req


class TwoRanks:
    """Two threads that stand for two ranks; `broadcast` hands rank 0's tensor to rank 1."""

    world_size = 2

    def __init__(self) -> None:
        self._here = threading.local()
        self._meeting = threading.Barrier(2, timeout=20)
        self._sent: torch.Tensor | None = None

    @property
    def rank_in_group(self) -> int:
        rank: int = self._here.rank
        return rank

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        if self.rank_in_group == 0:
            self._sent = tensor.clone()
        self._meeting.wait()
        assert self._sent is not None
        tensor.copy_(self._sent)

    def run(self, work: Any) -> list[Any]:
        """What ``work(rank)`` gave or raised on each rank."""
        outcomes: list[Any] = [None, None]

        def enter(rank: int) -> None:
            self._here.rank = rank
            try:
                outcomes[rank] = work(rank)
            except Exception as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


def test_equal_ranks_go_on() -> None:
    group = TwoRanks()
    tokens = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert group.run(lambda rank: follow_rank_0(group, {"tokens": tokens}, {"path": tokens + 1})) == [
        None,
        None,
    ]


@pytest.mark.parametrize(("name", "place"), [("tokens", 4), ("positions", 0), ("path", 5)])
def test_the_differing_tensor_is_named_on_the_rank_that_differs(name: str, place: int) -> None:
    group = TwoRanks()

    def work(rank: int) -> None:
        tensors = {each: torch.arange(6).view(2, 3) for each in ("tokens", "positions", "path")}
        if rank == 1:
            tensors[name].view(-1)[place] += 10
        path = tensors.pop("path")
        follow_rank_0(group, tensors, {"path": path})

    fine, error = group.run(work)
    assert fine is None
    assert isinstance(error, RankDisagreementError)
    assert f"rank 1 disagrees with rank 0 about {name}: 1 of 6 entries" in str(error)
    assert f"the first is {place + 10} here and {place} there" in str(error)


def verify_input(batch: int) -> SimpleNamespace:
    links = tree_links(PARENTS.repeat(batch, 1), torch.full((batch,), 30))
    return SimpleNamespace(
        draft_token_num=SLOTS,
        draft_token=TOKENS.repeat(batch, 1).flatten(),
        positions=links.positions,
        retrieve_next_token=links.retrieve_next_token,
        retrieve_next_sibling=links.retrieve_next_sibling,
        max_tree_depth=4,
    )


def perturb_token(tree: SimpleNamespace, logits: torch.Tensor) -> None:
    tree.draft_token[4] += 1  # a node that nothing accepts: the decisions stay equal


def perturb_position(tree: SimpleNamespace, logits: torch.Tensor) -> None:
    tree.positions += 1


def perturb_shape(tree: SimpleNamespace, logits: torch.Tensor) -> None:
    tree.retrieve_next_sibling[0, 1] = -1


def perturb_logits(tree: SimpleNamespace, logits: torch.Tensor) -> None:
    logits[3, 13] = -5.0


@pytest.mark.parametrize(
    ("perturb", "named"),
    [
        (None, None),
        (perturb_token, "the tree's tokens"),
        (perturb_position, "the tree's positions"),
        (perturb_shape, "the tree's siblings"),
        (perturb_logits, "the target's tokens"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_verify_notices_a_rank_with_other_input(
    monkeypatch: pytest.MonkeyPatch, perturb: Any, named: str | None
) -> None:
    group = TwoRanks()
    monkeypatch.setattr(verify, "_tensor_parallel_group", lambda: group)

    def work(rank: int) -> Any:
        tree, logits = verify_input(1), FULL_PATH.clone()
        if rank == 1 and perturb is not None:
            perturb(tree, logits)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False), sampling_info=greedy_info(1), reqs=[req()]
        )
        return sample_and_walk(tree, batch, SimpleNamespace(next_token_logits=logits))

    first, second = group.run(work)
    assert first[1].tolist() == [4]
    if named is None:
        assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
    else:
        assert isinstance(second, RankDisagreementError)
        assert f"rank 1 disagrees with rank 0 about {named}:" in str(second)
