"""Penalties are applied in one order, whichever way SGLang's set of classes is iterated."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator

from sgl_graft.serving.penalty_order import subtract_first

CLASSES = (
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
)
VOCAB = 50
BUILD = BatchedPenalizerOrchestrator.__init__


class Batch:
    """What the penalties ask of a batch, with one request that has all of them."""

    device = "cpu"

    def __init__(self) -> None:
        params = SimpleNamespace(
            frequency_penalty=0.4,
            presence_penalty=0.3,
            repetition_penalty=1.1,
            min_new_tokens=4,
            stop_token_ids={3},
        )
        tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=7)
        self.reqs = [SimpleNamespace(sampling_params=params, tokenizer=tokenizer, eos_token_ids={7})]


def penalised(order: tuple[Any, ...], repeat: int | None, fixed: bool) -> torch.Tensor:
    """Logits of one request after three tokens, with the classes iterated in ``order``."""
    batch = Batch()
    made = BatchedPenalizerOrchestrator.__new__(BatchedPenalizerOrchestrator)
    BUILD(made, VOCAB, batch, order)
    if fixed:
        subtract_first(None, made, VOCAB, batch, order)
    for token in (11, 12, 11):
        made.cumulate_output_tokens(torch.tensor([token]))
    logits = torch.linspace(-20, 20, VOCAB)[None].clone()
    made.apply(logits, repeat=repeat)
    return logits


@pytest.mark.parametrize("repeat", [None, 1], ids=["plain", "verify"])
def test_every_order_gives_the_logits_of_the_verify(repeat: int | None) -> None:
    expected = penalised(CLASSES, 1, fixed=True)
    for order in itertools.permutations(CLASSES):
        torch.testing.assert_close(penalised(order, repeat, fixed=True), expected)


def test_upstream_alone_depends_on_the_order() -> None:
    found = [penalised(order, None, fixed=False)[0, 11] for order in itertools.permutations(CLASSES)]
    assert max(found) - min(found) > 0.05
