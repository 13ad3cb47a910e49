"""What the draft has not read yet, while rounds run without it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_graft.graft.plain_rounds import Waiting

ROWS, WIDTH, HIDDEN = 6, 4, 3


def state(row: int, position: int) -> torch.Tensor:
    return torch.tensor([[float(row), float(position), 1.0]])


def test_tokens_wait_until_a_draft_extend_is_full() -> None:
    waiting = Waiting(ROWS, WIDTH, "cpu")
    for position in range(WIDTH):
        assert max(waiting.counts([2, 5])) == position
        waiting.add([2, 5], torch.cat((state(2, position), state(5, position))), torch.tensor([7, position]))
    assert waiting.counts([2, 5]) == [WIDTH, WIDTH]
    hidden, tokens = waiting.take([5, 2])
    assert tokens.view(2, WIDTH).tolist() == [[0, 1, 2, 3], [7] * WIDTH]
    assert hidden.view(2, WIDTH, HIDDEN)[0, :, 1].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert waiting.counts([2, 5]) == [0, 0]


def test_a_row_that_was_prefilled_anew_waits_for_nothing() -> None:
    waiting = Waiting(ROWS, WIDTH, "cpu")
    waiting.add([1], state(1, 0), torch.tensor([9]))
    waiting.restart(1)
    assert waiting.counts([1]) == [0]
    waiting.add([1], state(1, 5), torch.tensor([8]))
    hidden, tokens = waiting.take([1])
    assert tokens[0] == 8 and hidden[0, 1] == 5.0


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1), max_size=40), st.randoms())
def test_what_is_taken_is_what_was_added_in_order(rounds: list[list[int]], rng) -> None:
    """Batches of any rows, taken whole whenever one of them is full, as a server does."""
    waiting, model = Waiting(ROWS, WIDTH, "cpu"), {row: [] for row in range(ROWS)}
    for step, rows in enumerate(rounds):
        most = max(len(model[row]) for row in rows)
        if most == WIDTH or (most and rng.random() < 0.2):
            hidden, tokens = waiting.take(rows)
            for i, row in enumerate(rows):
                count = len(model[row])
                assert tokens.view(-1, WIDTH)[i, :count].tolist() == model[row]
                assert hidden.view(-1, WIDTH, HIDDEN)[i, :count, 1].tolist() == model[row]
                model[row] = []
        waiting.add(rows, torch.cat([state(row, step) for row in rows]), torch.tensor([step] * len(rows)))
        for row in rows:
            model[row].append(step)
        assert waiting.counts(list(range(ROWS))) == [len(model[row]) for row in range(ROWS)]
