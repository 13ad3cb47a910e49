"""BlockPilot's predictor in both forms: over raw logits as published, and folded onto the last hidden state.

The published network (paper section 3.2; layout of its released checkpoint) reads the target's raw logits
``z`` over the whole vocabulary V:

    x1 = relu(W0 z + b0);  x2 = relu(W1 x1 + b1) + x1;  scores = fc_out(x2)

Raw logits are linear in the hidden state before the LM head, ``z = s (H h + c)``, so ``W0 z`` is exactly
``(s W0 H) h + s W0 c``: :func:`fold` replaces the V-wide first matrix by a hidden-wide one. Class ``i`` is
for the i-th candidate size.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

FOLD_CHUNK = 8192  # vocabulary columns folded at once, so that the V-wide matrix is never copied whole


class Predictor(nn.Module):
    """``depth`` ReLU layers, all but the first residual, and a linear output.

    Its parameters carry the published names ``layers.{i}.{weight,bias}`` and ``fc_out.{weight,bias}``.

    Args:
        inputs: width of what it reads: the vocabulary, or the target's hidden size when folded.
        width: hidden width (2048 in the paper).
        classes: number of candidate sizes.
        depth: layers before the output (2 in the paper).
        dropout: share of hidden values dropped in training (0.2 in the paper).
    """

    def __init__(
        self, inputs: int, classes: int, width: int = 2048, depth: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        if min(inputs, width, classes, depth) < 1:
            raise ValueError(
                f"inputs {inputs}, width {width}, classes {classes}, depth {depth} must be positive"
            )
        self.layers = nn.ModuleList(nn.Linear(inputs if i == 0 else width, width) for i in range(depth))
        self.fc_out = nn.Linear(width, classes)
        self.dropout = nn.Dropout(dropout)
        for layer in self.linears:
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        nn.init.xavier_uniform_(self.fc_out.weight)
        nn.init.zeros_(self.fc_out.bias)

    @property
    def linears(self) -> list[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, x: Tensor) -> Tensor:  # [n, inputs] -> [n, classes]
        for i, layer in enumerate(self.linears):
            y = self.dropout(torch.relu(layer(x)))
            x = y if i == 0 else y + x
        out: Tensor = self.fc_out(x)
        return out

    @property
    def inputs(self) -> int:
        return self.linears[0].in_features

    @property
    def num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())


@dataclass(frozen=True)
class Head:
    """The part of a target that turns its last hidden state into raw logits.

    Attributes:
        weight: rows beyond ``vocab_size`` are padding. [rows, hidden]
        bias: [rows], or None.
        vocab_size: columns of the logits.
        scale: constant the logits are multiplied by.
        soft_cap: ``cap * tanh(logits / cap)`` is applied to the logits; None or 0 when there is none.
        first_row: vocabulary index of row 0 where this rank holds a shard.
    """

    weight: Tensor
    vocab_size: int
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    first_row: int = 0

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, rows of the vocabulary held here]
        """The raw logits as the target makes them."""
        rows = min(self.weight.shape[0], self.vocab_size - self.first_row)
        z = hidden.to(self.weight.dtype) @ self.weight[:rows].T
        if self.bias is not None:
            z = z + self.bias[:rows]
        z = z * self.scale
        return self.soft_cap * torch.tanh(z / self.soft_cap) if self.soft_cap else z


def check_foldable(head: Head, inputs: int) -> None:
    """Refuse a target whose logits are not linear in its hidden state, or of another vocabulary.

    Raises:
        ValueError: with the reason and what to use instead.
    """
    if head.soft_cap:
        raise ValueError(
            f"the target caps its logits softly (final_logit_softcapping {head.soft_cap}), which is not "
            "linear in the hidden state, so a predictor over raw logits cannot be folded; "
            "use blockpilot.policy fixed or ewma, or train a predictor for this target"
        )
    if inputs != head.vocab_size:
        raise ValueError(
            f"the predictor reads {inputs} logits, the target has a vocabulary of {head.vocab_size}: "
            "it was made for another target; use blockpilot.policy fixed or ewma"
        )


@torch.no_grad()
def fold(
    published: Predictor,
    head: Head,
    all_reduce: Callable[[Tensor], Tensor] = lambda x: x,
) -> Predictor:
    """The predictor that reads hidden states and gives the scores that ``published`` gives on their logits.

    Args:
        published: reads ``head.vocab_size`` logits.
        head: the target's, or this rank's shard of it.
        all_reduce: sums over tensor-parallel ranks; every rank ends with the same matrix.

    Raises:
        ValueError: see :func:`check_foldable`.
    """
    check_foldable(head, published.inputs)
    first = published.linears[0]
    rows = max(0, min(head.weight.shape[0], head.vocab_size - head.first_row))
    width, hidden = first.weight.shape[0], head.weight.shape[1]
    device = head.weight.device
    matrix = torch.zeros((width, hidden), dtype=torch.float32, device=device)
    constant = torch.zeros(width, dtype=torch.float32, device=device)
    for start in range(0, rows, FOLD_CHUNK):
        stop = min(start + FOLD_CHUNK, rows)
        columns = first.weight[:, head.first_row + start : head.first_row + stop].to(device).float()
        matrix.addmm_(columns, head.weight[start:stop].float(), alpha=head.scale)
        if head.bias is not None:
            constant.addmv_(columns, head.bias[start:stop].float(), alpha=head.scale)
    folded = Predictor(
        hidden, published.fc_out.out_features, width, len(published.layers), published.dropout.p
    )
    folded.to(device=device, dtype=torch.float32)
    folded.linears[0].weight.copy_(all_reduce(matrix))
    folded.linears[0].bias.copy_(all_reduce(constant) + first.bias.to(device).float())
    for ours, theirs in zip(folded.linears[1:], published.linears[1:], strict=True):
        ours.load_state_dict({k: v.to(device).float() for k, v in theirs.state_dict().items()})
    folded.fc_out.load_state_dict({k: v.to(device).float() for k, v in published.fc_out.state_dict().items()})
    return folded.eval()


def predictor_from_tensors(tensors: dict[str, Tensor], origin: str) -> Predictor:
    """Build a predictor from a state dict with the published key names.

    Raises:
        ValueError: keys or shapes are not a predictor's.
    """
    depth = sum(1 for key in tensors if key.startswith("layers.") and key.endswith(".weight"))
    expected = {f"layers.{i}.{part}" for i in range(depth) for part in ("weight", "bias")}
    expected |= {"fc_out.weight", "fc_out.bias"}
    if depth == 0 or set(tensors) != expected:
        raise ValueError(
            f"{origin} holds {sorted(tensors)[:8]}, not a predictor (layers.0.weight, ..., fc_out.bias)"
        )
    first, last = tensors["layers.0.weight"], tensors["fc_out.weight"]
    if first.dim() != 2 or last.dim() != 2:
        raise ValueError(f"{origin}: the weights of a predictor are matrices")
    with torch.device("meta"):
        predictor = Predictor(first.shape[1], last.shape[0], first.shape[0], depth)
    shapes = {key: tuple(value.shape) for key, value in predictor.state_dict().items()}
    for key, value in tensors.items():
        if tuple(value.shape) != shapes[key]:
            raise ValueError(f"{origin}: {key} has shape {tuple(value.shape)}, expected {shapes[key]}")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{origin}: {key} is damaged: it holds numbers that are not finite")
    predictor.load_state_dict(tensors, assign=True)
    return predictor.eval()


def load_published(path: Path) -> Predictor:
    """Read a released ``model.pt``. Nothing but tensors is unpickled.

    Raises:
        ValueError: the file is missing, damaged, holds anything but tensors, or is no predictor.
    """
    remedy = "name another blockpilot.policy_file, or use blockpilot.policy fixed"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise ValueError(f"policy file {path} cannot be read: {error}; {remedy}") from error
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"policy file {path} holds no state dict of tensors; {remedy}")
    return predictor_from_tensors(content, f"policy file {path}")


def parameters_of(predictor: Predictor) -> Iterator[tuple[str, Tensor]]:
    """Names and values for a checkpoint."""
    for name, value in predictor.state_dict().items():
        yield name, value.detach().to("cpu", torch.float32).contiguous()
