"""Trains the predictor in its folded form, and judges it on prompts it has not seen.

The published recipe (paper section 4.1): hard labels, cross-entropy, Adam at 1e-5, 100 epochs, two layers
of 2048, dropout 0.2. Ours differs in the targets (soft, by time), weight decay and a validation stop. Batch
size, schedule and seed of the paper are not published; 32 rows and a constant rate are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .predictor import Head, Predictor

Inputs = Literal["raw", "normalised", "softmax", "top_k"]
TOP_K = 64


@dataclass(frozen=True)
class Recipe:
    """How a predictor is trained.

    Attributes:
        width, depth, dropout: its shape.
        lr, weight_decay, epochs, batch: Adam's.
        soft: learn from soft targets instead of the one best size.
        patience: epochs without a better validation loss before training stops; 0 trains all epochs.
        inputs: what it reads. ``raw`` is the folded form; the others are ablations.
    """

    width: int = 256
    depth: int = 2
    dropout: float = 0.2
    lr: float = 3e-4
    weight_decay: float = 1e-2
    epochs: int = 200
    batch: int = 32
    soft: bool = True
    patience: int = 20
    inputs: Inputs = "raw"


PAPER = Recipe(width=2048, dropout=0.2, lr=1e-5, weight_decay=0.0, epochs=100, soft=False, patience=0)
OURS = Recipe()
ABLATIONS: dict[str, Recipe] = {
    "width 64": replace(OURS, width=64),
    "width 1024": replace(OURS, width=1024),
    "depth 1": replace(OURS, depth=1),
    "depth 3": replace(OURS, depth=3),
    "hard labels": replace(OURS, soft=False),
    "normalised": replace(OURS, inputs="normalised"),
    "softmax": replace(OURS, inputs="softmax"),
    "top-k values": replace(OURS, inputs="top_k"),
}


@torch.no_grad()
def features(
    hidden: Tensor,  # [n, hidden] last hidden states
    head: Head,
    inputs: Inputs,
) -> Tensor:  # [n, features] float32
    """What a predictor of each kind reads. Only ``raw`` and ``normalised`` need no vocabulary-wide layer."""
    hidden = hidden.float()
    if inputs == "raw":
        return hidden
    logits = head.logits(hidden).float()
    if inputs == "normalised":
        # (z - mean) / std is linear in h but for one scale per prompt, which the first layer cannot make.
        return hidden / logits.std(dim=1, keepdim=True)
    probs = torch.softmax(logits, dim=1)
    return probs if inputs == "softmax" else probs.topk(TOP_K, dim=1).values


def train(
    x: Tensor,  # [n, features]
    targets: Tensor,  # [n, classes], rows sum to 1
    recipe: Recipe,
    seed: int = 0,
) -> Predictor:
    """A trained predictor, in evaluation mode. A fifth of the rows decides when to stop."""
    torch.manual_seed(seed)
    model = Predictor(x.shape[1], targets.shape[1], recipe.width, recipe.depth, recipe.dropout)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    cut = len(x) // 5 if recipe.patience else 0
    check, use = order[:cut], order[cut:]
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    best, best_state, waited = float("inf"), None, 0
    for _ in range(recipe.epochs):
        model.train()
        for rows in use[torch.randperm(len(use))].split(recipe.batch):
            loss = cross_entropy(model(x[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not recipe.patience:
            continue
        model.eval()
        with torch.no_grad():
            held = float(cross_entropy(model(x[check]), targets[check]))
        if held < best - 1e-4:
            best, waited = held, 0
            best_state = {key: value.clone() for key, value in model.state_dict().items()}
        else:
            waited += 1
            if waited >= recipe.patience:
                break
    if best_state is not None:
        model.load_state_dict(best_state)
    return model.eval()


def targets_of(
    labels: Tensor,  # [n] column of the best size
    soft: Tensor,  # [n, classes]
    recipe: Recipe,
) -> Tensor:  # [n, classes] float32
    if recipe.soft:
        return soft.float()
    return torch.nn.functional.one_hot(labels, soft.shape[1]).float()


@torch.no_grad()
def choose(model: Predictor, x: Tensor) -> Tensor:  # [n, features] -> [n] column
    return model(x).argmax(dim=1)


def shuffled(x: Tensor, seed: int = 0) -> Tensor:
    """Control: every prompt gets another prompt's features, so nothing can be learned from them."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order]


def columns_within(sizes: Sequence[int], default: int, k: int) -> list[int]:
    """Columns of the candidates default-k .. default+k."""
    return [i for i, size in enumerate(sizes) if abs(size - default) <= k]
