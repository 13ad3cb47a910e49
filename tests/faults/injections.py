"""Faults of a draft and of what was learned, put into a scheduler for the length of a ``with`` block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Spoil = Callable[[torch.Tensor], None]


def nan(values: torch.Tensor) -> None:
    values.fill_(float("nan"))


def infinite(values: torch.Tensor) -> None:
    values.fill_(float("inf"))


def same_token(values: torch.Tensor) -> None:
    """The same for every row: the draft says one thing for ever."""
    values.copy_(torch.linspace(1.0, 2.0, values.shape[-1]).expand_as(values))


def noise(values: torch.Tensor) -> None:
    values.copy_(
        torch.randn(values.shape, generator=torch.Generator().manual_seed(int(values.numel()))) * 1e4
    )


SPOILS: dict[str, Spoil] = {"nan": nan, "inf": infinite, "same token": same_token, "noise": noise}


@contextlib.contextmanager
def spoiled_draft(engine: Any, algorithm: str, spoil: Spoil) -> Iterator[None]:
    """Everything that the draft's forward returns is spoiled."""
    worker = engine.worker
    if algorithm == "specblock":
        draft = worker.draft_worker.drafter.draft
        run = draft.run

        def spoiled_run(*args: Any, **kwargs: Any) -> torch.Tensor:
            hidden = run(*args, **kwargs)
            spoil(hidden)
            return hidden

        draft.run = spoiled_run
        try:
            yield
        finally:
            del draft.run
        return
    runner = worker.draft_model_runner if algorithm == "blockpilot" else worker.draft_worker.draft_runner
    forward = runner.forward

    def spoiled_forward(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        for name in ("next_token_logits", "hidden_states"):
            values = getattr(output.logits_output, name)
            if values is not None and values.numel():
                spoil(values)
        return output

    runner.forward = spoiled_forward
    try:
        yield
    finally:
        runner.forward = forward


def fill_with_garbage(table: Any, generator: torch.Generator) -> None:
    """Successors, tags and probabilities that are none, in every row of a successor table."""
    table.tokens.copy_(torch.randint(-3, table.vocab_size + 40, table.tokens.shape, generator=generator))
    probs = torch.rand(table.probs.shape, generator=generator) * 2 - 0.5
    probs[:, ::3] = float("nan")
    table.probs.copy_(probs)
    table.tags.copy_(torch.randint(-1, 2**40, table.tags.shape, generator=generator))


@contextlib.contextmanager
def spoiled_table(engine: Any) -> Iterator[None]:
    """Before every step the table is filled with garbage."""
    table = engine.worker.state.table
    step, generator = engine.step, torch.Generator().manual_seed(8)

    def spoil_and_step(**kwargs: Any) -> Any:
        fill_with_garbage(table, generator)
        return step(**kwargs)

    engine.step = spoil_and_step
    try:
        yield
    finally:
        del engine.step
        table.clear()


@contextlib.contextmanager
def spoiled_waiting(engine: Any) -> Iterator[None]:
    """What plain rounds keep for the draft is spoiled before the draft reads it."""
    waiting = engine.worker.waiting
    take = waiting.take

    def spoiled_take(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, tokens = take(rows)
        return hidden.fill_(float("nan")), torch.zeros_like(tokens)

    waiting.take = spoiled_take
    try:
        yield
    finally:
        del waiting.take


@contextlib.contextmanager
def clock_that_jumps(engine: Any) -> Iterator[None]:
    """Every reading of the clocks is days away from the one before, forwards and backwards."""
    import time
    from unittest import mock

    jumps = iter(range(10**9))

    def wild() -> float:
        n = next(jumps)
        return 1.7e9 + (-1) ** n * 86_400.0 * (n % 50)

    with mock.patch.object(time, "time", wild):
        yield
