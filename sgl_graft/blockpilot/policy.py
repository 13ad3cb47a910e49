"""Who chooses a request's block size: one protocol, and the two policies that need no model.

A policy speaks twice: once per request at the end of its prefill, and after each round, when it may choose
again. All of it is batched tensors on one device; nothing is read back to the host. The choice changes speed,
never output.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .order import hash64


@dataclass(frozen=True)
class Prefilled:
    """Requests whose prefill ended in this step.

    Attributes:
        rows: row of the request pool. [n] int64
        hidden: the target's last hidden state at the last prompt position, before its LM head, or None when
            the policy does not read it. [n, hidden]
        temperature: sampling temperature, 0 when greedy. [n] float32, on the host
        names: request ids, on the host.
    """

    rows: Tensor
    hidden: Tensor | None
    temperature: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """One finished round.

    Attributes:
        rows: row of the request pool. [n] int64
        block_lens: block size each request was verified at, root included. [n] int32
        accepted: drafted tokens accepted. [n] int32
        batch: running requests, on the host.
        names: request ids, on the host.
    """

    rows: Tensor
    block_lens: Tensor
    accepted: Tensor
    batch: int
    names: tuple[str, ...]


class BlockSizePolicy(Protocol):
    """Chooses block sizes.

    Attributes:
        name: shown to people.
        default: the size of a request the policy has nothing to say about.
        reads_hidden: whether :meth:`first` needs hidden states.
        tries: rows of the request pool whose next block is there to learn from and must be run as it is; None
            for a policy that does not learn. [num_rows] bool
    """

    name: str
    default: int

    @property
    def reads_hidden(self) -> bool: ...

    @property
    def tries(self) -> Tensor | None: ...

    def first(self, prefilled: Prefilled) -> Tensor:
        """Block size of each request. [n] int32"""
        ...

    def again(self, finished: Round) -> Tensor | None:
        """Block sizes for the next round, or None to keep them. [n] int32"""
        ...


class FixedPolicy:
    """The same size for everyone: what a server runs when nothing better was shown."""

    name = "fixed"
    reads_hidden = False
    tries = None

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.default = size
        self.device = device

    def first(self, prefilled: Prefilled) -> Tensor:
        return torch.full((len(prefilled.names),), self.default, dtype=torch.int32, device=self.device)

    def again(self, finished: Round) -> Tensor | None:
        return None


class ReplayPolicy:
    """Sizes from a recording, for tests and for the oracle of an evaluation.

    Args:
        by_request: request id -> its sizes, one per round; the last one stays.
        default: size of other requests.
        random: when given ``(seed, low, high)``, other requests get a new size every round, drawn from the
            seed, their id and the number of the round.
    """

    name = "replay"
    reads_hidden = False
    tries = None

    def __init__(
        self,
        by_request: dict[str, tuple[int, ...]],
        default: int,
        random: tuple[int, int, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.by_request = by_request
        self.default = default
        self.random = random
        self.device = device
        self.rounds: dict[str, int] = {}

    def _size(self, name: str, at: int) -> int:
        sizes = self.by_request.get(name)
        if sizes:
            return sizes[min(at, len(sizes) - 1)]
        if self.random is None:
            return self.default
        seed, low, high = self.random
        return low + hash64(seed, name, at) % (high - low + 1)

    def first(self, prefilled: Prefilled) -> Tensor:
        for name in prefilled.names:
            self.rounds[name] = 0
        sizes = [self._size(name, 0) for name in prefilled.names]
        return torch.tensor(sizes, dtype=torch.int32, device=self.device)

    def again(self, finished: Round) -> Tensor | None:
        sizes = []
        for name in finished.names:
            self.rounds[name] = at = self.rounds.get(name, 0) + 1
            sizes.append(self._size(name, at))
        return torch.tensor(sizes, dtype=torch.int32, device=self.device)


def read_replay(path: Path, default: int, device: torch.device | str = "cpu") -> ReplayPolicy:
    """Read ``{"sizes": {"request id": [9, 4]}, "default": 8, "random": {"seed": 1, "low": 1, "high": 8}}``.

    Raises:
        ValueError: the file is missing or not of this form.
    """
    form = 'an object with "sizes" (request id -> size or list of sizes), "default" and "random"'
    try:
        data = json.loads(path.read_text())
        unknown = set(data) - {"sizes", "default", "random"}
        if unknown:
            raise ValueError(f"unknown keys {sorted(unknown)}")
        sizes = {
            name: tuple(map(int, given)) if isinstance(given, list) else (int(given),)
            for name, given in data.get("sizes", {}).items()
        }
        draw = data.get("random")
        random = None if draw is None else (int(draw["seed"]), int(draw["low"]), int(draw["high"]))
        chosen = int(data.get("default", default))
        every = [chosen, *(size for given in sizes.values() for size in given), *(random or ())[1:]]
        if min(every) < 1 or (random and random[1] > random[2]):
            raise ValueError("sizes must be at least 1, and low at most high")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"replay file {path} cannot be used: {error}; it holds {form}") from error
    return ReplayPolicy(sizes, chosen, random, device)
