"""SpecBlock's losses: valid-prefix mask of the tokens, rank classes and their loss (design note 4.3, 4.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CLASSES = 4
_LAST_RANK = (1, 4, 10)  # of classes 0, 1, 2; beyond is class 3


def prefix_mask(right: Tensor, valid: Tensor) -> Tensor:
    """Slots whose loss counts, `[rows, K]` bool: those behind slots that were all right.

    right, valid `[rows, K]` bool: the slot proposed the target's likeliest token; the slot has a target.
    """
    before = torch.ones_like(right)
    before[:, 1:] = right[:, :-1].cummin(dim=1).values
    return before & valid


def rank_class(top_ids: Tensor, wanted: Tensor) -> Tensor:
    """Class `[..]` of the wanted token's rank in the draft's list: 0 for 1, 1 for 2-4, 2 for 5-10, else 3.

    top_ids `[.., >= 10]` the draft's likeliest tokens, likeliest first; wanted `[..]`, -1 for none of them.
    """
    hits = top_ids[..., :10] == wanted.unsqueeze(-1)
    rank = torch.where(hits.any(-1), hits.int().argmax(-1) + 1, 11)  # [..]
    return sum((rank > last).long() for last in _LAST_RANK)  # type: ignore[return-value]


def soft_labels() -> Tensor:
    """`[true class, class]`: mass by distance, less of it on classes that promise a better rank."""
    true, other = torch.arange(CLASSES).unsqueeze(1), torch.arange(CLASSES)
    mass = 1.0 / (1 + (other - true).abs() + (true - other).clamp_min(0)).float() ** 2
    return mass / mass.sum(1, keepdim=True)


def rank_loss(logits: Tensor, classes: Tensor, valid: Tensor, budget: float = 10.0) -> Tensor:
    """Scalar. logits `[rows, K, 4]`, classes `[rows, K]` true classes, valid `[rows, K]` bool.

    A row counts up to and including its first slot whose class is guessed wrong. Guesses weigh by distance,
    twice when they promise a better rank than there is; a class that is frequent in a slot weighs
    `budget / count`.
    """
    guess = logits.argmax(-1)  # [rows, K]
    mask = prefix_mask(guess == classes, valid)
    labels = soft_labels()[classes]  # [rows, K, 4]
    entropy = -(labels * F.log_softmax(logits.float(), dim=-1)).sum(-1)
    distance = 1 + (classes - guess).abs() + (classes - guess).clamp_min(0)
    counts = (F.one_hot(classes, CLASSES) * mask.unsqueeze(-1)).sum(0)  # [K, 4]
    frequency = (budget / counts.clamp_min(1)).clamp_max(1.0)
    weight = mask * frequency.gather(1, classes.T).T
    return (weight * distance * entropy).sum() / weight.sum().clamp_min(1e-6)
