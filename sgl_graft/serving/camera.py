"""The tree of one request's last round, taken only while somebody looks.

A status request asks for a picture; the next round copies its first request's tree to the host without
waiting, and the status request after that shows it. Rounds that nobody asked about cost a test of a flag.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from .metrics import HostCopy

NOT_TOLD_APART = 0  # source of a node where an algorithm does not say who proposed it


@dataclass(frozen=True)
class TreePicture:
    """One request's tree. The lists run over its slots; slot 0 is the root, and empty slots are left out.

    Attributes:
        tokens: token ids.
        parents: index of each node's parent in these lists, -1 for the root.
        sources: who proposed it: bit 1 the draft, bit 2 the successor table; 0 for the root, and
            :data:`NOT_TOLD_APART`.
        accepted: whether the target accepted it.
        bonus: the token that the target added behind the last accepted node.
    """

    tokens: list[int]
    parents: list[int]
    sources: list[int]
    accepted: list[bool]
    bonus: int


class Camera:
    """Takes the last round's tree of the first request in the batch."""

    def __init__(self) -> None:
        self._wanted = False
        self._under_way: HostCopy | None = None
        self._last: TreePicture | None = None

    @property
    def wanted(self) -> bool:
        """Whether the next round shall be taken."""
        return self._wanted

    def take(
        self,
        tokens: torch.Tensor,  # [batch, slots]
        parents: torch.Tensor,  # [batch, slots], -1 for the root and for empty slots
        sources: torch.Tensor,  # [batch, slots]; what the root's entry says is not used
        accepted: torch.Tensor,  # [batch, slots] bool, the root's entry true
        committed: torch.Tensor,  # [batch, slots] tokens committed, packed to the front, the bonus last
        accept_lens: torch.Tensor,  # [batch], bonus included
    ) -> None:
        """A round is over. Only called when :attr:`wanted`."""
        self._wanted = False
        first = {
            "tokens": tokens, "parents": parents, "sources": sources, "accepted": accepted,
            "committed": committed, "length": accept_lens,
        }  # fmt: skip
        self._under_way = HostCopy({name: tensor[:1].clone() for name, tensor in first.items()})

    def last(self) -> TreePicture | None:
        """The latest picture, None before the first one; asks for the next."""
        if self._under_way is not None and (fetched := self._under_way.arrived()) is not None:
            self._under_way = None
            self._last = picture(**{name: rows[0] for name, rows in fetched.items()})
        self._wanted = self._under_way is None
        return self._last


def picture(
    tokens: list[int],
    parents: list[int],
    sources: list[int],
    accepted: list[bool],
    committed: list[int],
    length: int,
) -> TreePicture:
    """One request's slots without the empty ones."""
    kept = [0, *(slot for slot in range(1, len(tokens)) if parents[slot] >= 0 and tokens[slot] >= 0)]
    place = {slot: index for index, slot in enumerate(kept)}
    return TreePicture(
        tokens=[tokens[slot] for slot in kept],
        parents=[-1, *(place.get(parents[slot], 0) for slot in kept[1:])],
        sources=[0, *(sources[slot] for slot in kept[1:])],
        accepted=[True, *(bool(accepted[slot]) for slot in kept[1:])],
        bonus=committed[length - 1],
    )


def on_path(accept_index: torch.Tensor, batch: int, slots: int) -> torch.Tensor:  # [batch, slots] bool
    """Which slots were accepted, from flat node indices [batch, path], the root first, -1 padded."""
    path = accept_index[:batch].long()
    flat = torch.zeros(batch * slots + 1, dtype=torch.bool, device=path.device)
    flat[torch.where(path >= 0, path, batch * slots)] = True
    return flat[:-1].view(batch, slots)


def shape_of(found: TreePicture | None) -> dict[str, Any] | None:
    """A picture without its tokens: what a status may show to whoever may ask for answers."""
    if found is None:
        return None
    return {name: value for name, value in asdict(found).items() if name not in ("tokens", "bonus")}
