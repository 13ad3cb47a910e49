"""The CPU's implementations of the operations on trees and tables against the torch references, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from sgl_graft.cuda_graph import dispatch
from sgl_graft.cuda_graph.check_cases import Round, Shape, op_cases, random_round, readable
from sgl_graft.cuda_graph.coupled import parents_from_links
from sgl_graft.cuda_graph.table_update import write_successors
from sgl_graft.cuda_graph.top_successors import top_successors
from sgl_graft.cuda_graph.tree_links import tree_links

from sgl_graft.cpu import tree_kernels

from .compiler import needs_compiler

pytestmark = needs_compiler

SHAPES = [
    Shape(batch=1, slots=16, topk=4, steps=5, max_depth=9, vocab=300),
    Shape(batch=3, slots=8, topk=2, steps=3, max_depth=7, vocab=90, context_rows=64),
    Shape(batch=2, slots=60, topk=10, steps=5, max_depth=9, vocab=1000, context_rows=0),
    Shape(batch=2, slots=2, topk=2, steps=2, max_depth=2, vocab=70),
]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "_host_ops", {})
    tree_kernels.register()
    assert len(dispatch._host_ops) == 10
    for name in dispatch._host_ops:
        assert name.endswith("_torch")
    yield


def assert_same(op: Callable[[], Sequence[torch.Tensor]], name: str = "") -> None:
    with dispatch.forced_backend("torch"):
        reference = [tensor.clone() for tensor in op()]
    for wanted, got in zip(reference, op(), strict=True):
        assert wanted.dtype == got.dtype and wanted.shape == got.shape, name
        if wanted.dtype == torch.float16:  # softmax: its sums are rounded in another order
            distance = (wanted.view(torch.int16).int() - got.view(torch.int16).int()).abs()
            assert not distance.numel() or int(distance.max()) <= 1, name
        else:
            assert torch.equal(wanted, got), name


def damaged(case: Round, seed: int) -> Round:
    """The same round over a table that holds ids outside the vocabulary and impossible probabilities, with
    requests that have no table and roots that are no tokens.
    """
    gen = torch.Generator().manual_seed(seed)
    table = case.copy_of_table()
    rows = torch.randint(0, table.empty_row, (200,), generator=gen)
    table.tokens[rows, 0] = torch.randint(-9, 2 * case.shape.vocab, (200,), generator=gen, dtype=torch.int32)
    table.probs[rows, 1] = torch.tensor([float("nan"), float("inf"), -1.0, 7.0, 6e-8]).half().repeat(40)
    batch = case.shape.batch
    return replace(
        case,
        table=table,
        table_index=torch.randint(-1, 2, (batch,), generator=gen),
        root_tokens=torch.tensor([-1, case.shape.vocab, 2**40, 5])[
            torch.randint(0, 4, (batch,), generator=gen)
        ],
        contexts=torch.tensor([-1, 3, 2**41 + 7])[torch.randint(0, 3, (batch,), generator=gen)],
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_every_operation(shape: Shape, seed: int) -> None:
    case = random_round(shape, "cpu", seed)
    case = replace(case, logits=case.logits.float())
    for name, op in op_cases(case).items():
        assert_same(op, name)
    if shape.vocab <= 300:
        assert_same(op_cases(damaged(case, seed))["retrieve"], "retrieve from a damaged table")


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_equal_logits(shape: Shape) -> None:
    """Ties are ordered by token id, infinities and NaN included."""
    gen = torch.Generator().manual_seed(3)
    logits = torch.randint(-2, 3, (shape.slots, shape.vocab), generator=gen).float()
    logits[0, 5], logits[1, 7], logits[2] = float("inf"), -float("inf"), -0.0
    assert_same(lambda: top_successors(logits, 8, shape.vocab - 3)[:1])
    logits[3, 40] = float("nan")
    assert_same(lambda: top_successors(logits, 8, shape.vocab))


def test_parents_that_are_garbage() -> None:
    """Padding may hold anything: nothing outside the request is touched, the result is the reference's."""
    gen = torch.Generator().manual_seed(1)
    for _ in range(50):
        parents = torch.randint(-3, 14, (3, 12), generator=gen)
        assert_same(lambda parents=parents: tree_links(parents, torch.tensor([1, 5, 9])))


def test_links_and_back() -> None:
    for seed in range(20):
        gen = torch.Generator().manual_seed(seed)
        parents = torch.full((4, 16), -1)
        for slot in range(1, 16):
            parents[:, slot] = torch.randint(-1, slot, (4,), generator=gen)
        links = tree_links(parents, torch.zeros(4, dtype=torch.int64))
        assert_same(
            lambda links=links: (parents_from_links(links.retrieve_next_token, links.retrieve_next_sibling),)
        )
        assert torch.equal(
            parents_from_links(links.retrieve_next_token, links.retrieve_next_sibling), parents
        )


def test_writes_that_collide() -> None:
    """Few tokens, so that most nodes of a batch want the same rows."""
    for seed in range(20):
        case = random_round(Shape(3, 16, 4, 5, 9, 40, 16), "cpu", seed)
        gen = torch.Generator().manual_seed(seed)
        tokens = torch.randint(-1, 5, (3, 16), generator=gen)
        tokens[0, 3] = 10**6
        parents = torch.full((3, 16), -1)
        for slot in range(1, 16):
            parents[:, slot] = torch.randint(-1, slot, (3,), generator=gen)
        best = top_successors(case.logits.float(), 8, 40)

        def run(
            case: Round = case, tokens: torch.Tensor = tokens, parents: torch.Tensor = parents, best=best
        ):
            table = case.copy_of_table()
            write_successors(
                table, torch.tensor([0, -1, 0]), tokens, parents, parents.clamp(min=0), case.contexts,
                case.accepted, best,
            )  # fmt: skip
            return readable(table)

        assert_same(run)
