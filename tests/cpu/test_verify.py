"""The whole verify step that stands for SGLang's `eagle_sample`, on hand-made batches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sgl_graft.cuda_graph.tree_links import tree_links

from sgl_graft.cpu import verify
from sgl_graft.cpu.verify import sample_and_walk

from .two_tokens import Filters, sampling_info

VOCAB = 20
SLOTS = 6
PARENTS = torch.tensor([[-1, 0, 0, 1, 1, 3]])
TOKENS = torch.tensor([[2, 5, 7, 9, 11, 13]])


class Bias:
    """A grammar mask or a penaliser: adds a fixed tensor."""

    def __init__(self, amount: torch.Tensor) -> None:
        self.amount = amount
        self.is_required = True

    def apply(self, logits: torch.Tensor, repeat: int = 1) -> None:
        logits.add_(self.amount.repeat_interleave(repeat, dim=0))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_tensor_parallel_group", lambda: SimpleNamespace(world_size=1))


def req(**sampling: Any) -> SimpleNamespace:
    params = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    return SimpleNamespace(sampling_params=SimpleNamespace(**(params | sampling)))


def greedy_info(batch: int, **fields: Any) -> SimpleNamespace:
    info = sampling_info(torch.arange(batch), Filters(top_k=1))
    info.is_all_greedy = True
    nothing = {
        "acc_additive_penalties": None,
        "acc_scaling_penalties": None,
        "penalizer_orchestrator": None,
        "logit_bias": None,
        "has_custom_logit_processor": False,
    }
    vars(info).update(nothing | fields)
    return info


def run(
    logits: torch.Tensor,  # [batch * slots, vocab]
    info: SimpleNamespace,
    reqs: list[SimpleNamespace],
    grammar_mask: Any = None,
) -> tuple[list[list[int]], torch.Tensor]:
    """Committed tokens of every request, and the accepted rows."""
    batch = len(reqs)
    links = tree_links(PARENTS.repeat(batch, 1), torch.full((batch,), 30))
    verify_input = SimpleNamespace(
        draft_token_num=SLOTS,
        draft_token=TOKENS.repeat(batch, 1).flatten(),
        positions=links.positions,
        retrieve_next_token=links.retrieve_next_token,
        retrieve_next_sibling=links.retrieve_next_sibling,
        max_tree_depth=4,
    )
    schedule_batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False), sampling_info=info, reqs=reqs
    )
    output = SimpleNamespace(next_token_logits=logits)
    predict, accept_lens, accept_index = sample_and_walk(verify_input, schedule_batch, output, grammar_mask)
    assert predict.dtype == accept_lens.dtype == accept_index.dtype == torch.int32
    assert accept_index.shape == (batch, 4)
    committed = []
    for row in range(batch):
        path = accept_index[row, : accept_lens[row]].tolist()
        assert (accept_index[row, accept_lens[row] :] == -1).all()
        committed.append([int(predict[node]) for node in path])
    return committed, accept_index


def logits_that_choose(*choices: int) -> torch.Tensor:
    """Logits of one request whose argmax after slot ``i`` is ``choices[i]``; the runner-up is one above."""
    logits = torch.zeros(SLOTS, VOCAB)
    for slot, token in enumerate(choices):
        logits[slot, token] = 5.0
        logits[slot, (token + 1) % VOCAB] = 4.0
    return logits


FULL_PATH = logits_that_choose(5, 9, 1, 13, 1, 17)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        (FULL_PATH, [5, 9, 13, 17]),
        (logits_that_choose(7, 9, 3, 13, 1, 1), [7, 3]),
        (logits_that_choose(6, 9, 3, 13, 1, 1), [6]),
        (logits_that_choose(5, 11, 1, 1, 4, 1), [5, 11, 4]),
    ],
    ids=["whole path", "second child", "nothing accepted", "sibling below"],
)
def test_greedy_walks(logits: torch.Tensor, expected: list[int]) -> None:
    committed, _ = run(logits.clone(), greedy_info(1), [req()])
    assert committed == [expected]


def test_rows_of_a_batch_are_walked_apart() -> None:
    logits = torch.cat([FULL_PATH, logits_that_choose(7, 9, 3, 13, 1, 1)])
    committed, accept_index = run(logits, greedy_info(2), [req(), req()])
    assert committed == [[5, 9, 13, 17], [7, 3]]
    assert accept_index.tolist() == [[0, 1, 3, 5], [6, 8, -1, -1]]


def _additive(amount: torch.Tensor) -> dict[str, Any]:
    return {"acc_additive_penalties": amount}


def _orchestrated(amount: torch.Tensor) -> dict[str, Any]:
    return {"penalizer_orchestrator": Bias(amount)}


def _biased(amount: torch.Tensor) -> dict[str, Any]:
    return {"logit_bias": amount}


@pytest.mark.parametrize("fields", [_additive, _orchestrated, _biased])
def test_a_requests_bias_reaches_all_of_its_nodes_and_no_others(
    fields: Callable[[torch.Tensor], dict[str, Any]],
) -> None:
    amount = torch.zeros(2, VOCAB)
    amount[1, [9, 17]] = -9.0  # turns the choice after slots 1 and 5 of the second request to the runner-up
    logits = torch.cat([FULL_PATH, FULL_PATH])
    committed, _ = run(logits, greedy_info(2, **fields(amount)), [req(), req()])
    assert committed == [[5, 9, 13, 17], [5, 10]]


def test_scaling_penalties_reach_all_nodes() -> None:
    scaling = torch.ones(2, VOCAB)
    scaling[1, 9] = 2.0
    logits = torch.cat([FULL_PATH, FULL_PATH])
    committed, _ = run(logits, greedy_info(2, acc_scaling_penalties=scaling), [req(), req()])
    assert committed == [[5, 9, 13, 17], [5, 10]]


def test_grammar_masks_every_node() -> None:
    amount = torch.zeros(SLOTS, VOCAB)
    amount[3, 13] = float("-inf")
    committed, _ = run(FULL_PATH.clone(), greedy_info(1), [req()], grammar_mask=Bias(amount))
    assert committed == [[5, 9, 14]]


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 3},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_a_penalised_request_commits_one_token_and_its_neighbour_a_run(sampling: dict[str, Any]) -> None:
    logits = torch.cat([FULL_PATH, FULL_PATH])
    committed, _ = run(logits, greedy_info(2), [req(**sampling), req()])
    assert committed == [[5], [5, 9, 13, 17]]


def test_not_a_number_does_not_reach_the_output() -> None:
    logits = FULL_PATH.clone()
    logits[1] = float("nan")
    committed, _ = run(logits, greedy_info(1), [req()])
    assert committed[0][0] == 5
    assert all(0 <= token < VOCAB for token in committed[0])


def test_an_idle_batch_commits_nothing() -> None:
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True))
    outputs = sample_and_walk(SimpleNamespace(), batch, SimpleNamespace())
    assert [output.numel() for output in outputs] == [0, 0, 0]
