"""From measured runs to labels: which block size was best for each prompt.

A label follows one of two rules. ``time`` takes the smallest time per token, ``L(b) = rounds(b) *
cost(batch, b) / tokens(b)`` (paper section 3.1 without its assumption that cost does not depend on ``b``).
``accept`` takes the largest accept length, as the paper does. Ties go to the default size; the released code
takes the smallest. Several runs of one prompt and size (seeds at T > 0) are averaged before labels are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .costs import CostTable

Rule = Literal["time", "accept"]


@dataclass(frozen=True)
class Run:
    """One prompt decoded at one block size.

    Attributes:
        prompt: key of the prompt.
        size: block size, root included.
        tokens: tokens generated.
        rounds: verifies it took.
        seed: sampling seed; 0 for greedy.
        stopped: whether it was ended early because it could no longer win; its figures are then those up to
            there.
        rule: what it would have had to win by.
    """

    prompt: str
    size: int
    tokens: int
    rounds: int
    seed: int = 0
    stopped: bool = False
    rule: Rule = "time"

    @property
    def accept_length(self) -> float:
        return self.tokens / max(self.rounds, 1)


@dataclass(frozen=True)
class Scores:
    """Accept length of every prompt at every size.

    Attributes:
        prompts: keys, in the order of the rows.
        sizes: rising block sizes, in the order of the columns.
        accept: tokens per round, averaged over seeds. [prompts, sizes] float64
    """

    prompts: tuple[str, ...]
    sizes: tuple[int, ...]
    accept: Tensor

    def speed(self, costs: CostTable | None, batch: int = 1) -> Tensor:
        """Tokens per second by the cost table; the accept length itself without one. [prompts, sizes]"""
        if costs is None:
            return self.accept
        return self.accept / costs.row(batch, self.sizes).to(self.accept.dtype)


def scores_of(runs: Iterable[Run], sizes: Sequence[int]) -> Scores:
    """Average the runs. A prompt that lacks a size is left out: a size is never guessed from another.

    Raises:
        ValueError: no prompt was run at all sizes.
    """
    seen: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        if run.tokens > 0 and run.rounds > 0:
            seen.setdefault((run.prompt, run.size), []).append(run.accept_length)
    prompts = sorted({prompt for prompt, _ in seen})
    whole = [prompt for prompt in prompts if all((prompt, size) in seen for size in sizes)]
    if not whole:
        raise ValueError(f"no prompt was run at all of the sizes {list(sizes)}")
    means = [[sum(seen[p, b]) / len(seen[p, b]) for b in sizes] for p in whole]
    return Scores(tuple(whole), tuple(sizes), torch.tensor(means, dtype=torch.float64))


def best_sizes(
    value: Tensor,  # [prompts, sizes], larger is better
    sizes: Sequence[int],
    default: int,
    ties: Literal["default", "first"] = "default",
    tolerance: float = 0.0,
) -> Tensor:  # [prompts] int64 column of the best size
    """Label of every prompt.

    Args:
        ties: ``default`` takes the default size when it is as good as the best, else the one nearest to it;
            ``first`` takes the smallest size, as the released code does.
        tolerance: relative difference that counts as a tie.
    """
    best = value.amax(dim=1, keepdim=True)
    tied = value >= best * (1 - tolerance)
    if ties == "first":
        return tied.to(torch.int64).argmax(dim=1)
    distance = torch.tensor([abs(size - default) for size in sizes], dtype=torch.float64)
    order = torch.where(tied, distance, torch.inf)
    return order.argmin(dim=1)


def soft_targets(
    value: Tensor,  # [prompts, sizes] tokens per second or per round, larger is better
    spread: float = 0.02,
) -> Tensor:  # [prompts, sizes], rows sum to 1
    """``softmax(-L(b) / s)`` over the time per token L: near-ties share the target.

    Args:
        spread: ``s`` relative to the prompt's best time per token.
    """
    latency = 1.0 / value
    best = latency.amin(dim=1, keepdim=True)
    return torch.softmax(-(latency / best - 1.0) / spread, dim=1)


def can_still_win(
    rounds: int,
    tokens: int,
    size: int,
    tokens_in_all: int,
    best_cost: float,
    cost_per_round: float,
) -> bool:
    """Whether a size that has made ``tokens`` of ``tokens_in_all`` in ``rounds`` can still be the cheapest.

    At best it commits ``size`` tokens in every round to come. ``best_cost`` is the cost of the cheapest size
    that has finished: its rounds times its cost per round.
    """
    missing = max(tokens_in_all - tokens, 0)
    at_least = rounds + -(-missing // size)
    return at_least * cost_per_round < best_cost
