"""A draft's weights side by side in one bf16 buffer: what travels between learner, ranks and disk."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..model import SpecBlockDraft

MOST_GROWTH = 4.0  # of a tensor's norm by one update; more is an explosion


class WeightArea:
    """Views by parameter name into one flat buffer."""

    def __init__(self, shapes: Mapping[str, torch.Size], flat: Tensor) -> None:
        """flat `[sum of sizes]` bf16, on the host."""
        self.flat = flat
        self.views: dict[str, Tensor] = {}
        place = 0
        for name, shape in shapes.items():
            size = shape.numel()
            self.views[name] = flat[place : place + size].view(shape)
            place += size
        assert place == flat.numel(), "the buffer was made for another draft"

    @classmethod
    def private(cls, draft: SpecBlockDraft) -> WeightArea:
        """With memory of its own, holding the draft's weights."""
        shapes = {name: p.shape for name, p in draft.named_parameters()}
        area = cls(shapes, torch.empty(size_of(draft), dtype=torch.bfloat16))
        area.read_from(draft)
        return area

    @classmethod
    def shared(cls, draft: SpecBlockDraft, descriptor: int) -> WeightArea:
        """Over a file that other processes map, too."""
        count = size_of(draft)
        os.ftruncate(descriptor, count * 2)
        memory = mmap.mmap(descriptor, count * 2)
        flat = torch.frombuffer(memory, dtype=torch.bfloat16)
        return cls({name: p.shape for name, p in draft.named_parameters()}, flat)

    @torch.no_grad()
    def read_from(self, draft: SpecBlockDraft) -> None:
        for name, p in draft.named_parameters():
            self.views[name].copy_(p)

    @torch.no_grad()
    def write_to(self, draft: SpecBlockDraft, names: Iterable[str] | None = None) -> None:
        """Copy the weights `names` (None: all) into the draft, in place."""
        own = dict(draft.named_parameters())
        for name in self.views if names is None else names:
            own[name].copy_(self.views[name])

    def copy_from(self, other: WeightArea) -> None:
        self.flat.copy_(other.flat)

    def problem(self, before: WeightArea) -> str | None:
        """Why these weights must not serve, or None; `before` are weights that do."""
        if not bool(self.flat.isfinite().all()):
            return "they are not all finite"
        for name, value in self.views.items():
            norm, known = float(value.float().norm()), float(before.views[name].float().norm())
            if norm > MOST_GROWTH * known + 1.0:
                return f"{name} grew from a norm of {known:.3g} to {norm:.3g}"
        return None


def size_of(draft: SpecBlockDraft) -> int:
    """Weights of the draft."""
    return sum(p.numel() for p in draft.parameters())


def digest_of(flat: Tensor) -> str:
    """Of every bit of a buffer `[weights]`."""
    return hashlib.sha256(flat.contiguous().view(torch.uint8).numpy().data).hexdigest()
