"""What a greedy answer would have met on its way, so that tree rules can be replayed without a model.

At every position of a known answer it keeps the draft's whole pool, the target's likeliest successors, and
those after every node of the stock tree, which is what rejected nodes teach the table. Successors after
rejected nodes that only the table proposed are unknown in a replay; `ablation` measures what that costs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sgl_graft.cuda_graph.eagle_tree import DraftPool

ROW_WIDTH = 12  # successors kept: the widest table row of the ablation


@dataclass(frozen=True)
class Shape:
    """Of the draft that is recorded; replays may use fewer slots, not another topk or steps."""

    steps: int = 5
    topk: int = 4
    slots: int = 16  # of the stock tree whose nodes are looked up in the target


@dataclass(frozen=True)
class Answer:
    """One recorded answer of n tokens; row i of everything belongs to the root `tokens[i]`."""

    prompt: Tensor  # [prompt] int64
    tokens: Tensor  # [n] int64
    next_ids: Tensor  # [n, ROW_WIDTH] int32, the target's likeliest tokens after each, best first
    next_probs: Tensor  # [n, ROW_WIDTH] float16
    pool_tokens: Tensor  # [n, pool] int64
    pool_parents: Tensor  # [n, pool] int64
    pool_scores: Tensor  # [n, pool] float32
    tree_tokens: Tensor  # [n, slots] int64, the stock tree
    tree_parents: Tensor  # [n, slots] int64, -1 for the root and for empty slots
    tree_ids: Tensor  # [n, slots, ROW_WIDTH] int32, the target's likeliest tokens after each node
    tree_probs: Tensor  # [n, slots, ROW_WIDTH] float16

    def pool(self, position: int) -> DraftPool:
        at = slice(position, position + 1)
        return DraftPool(self.pool_tokens[at], self.pool_parents[at], self.pool_scores[at])


@dataclass(frozen=True)
class Recording:
    shape: Shape
    vocab_size: int
    names: tuple[tuple[str, int], ...]  # (data set, prompt) of each answer
    answers: tuple[Answer, ...]

    def save(self, path: Path) -> None:
        tensors = {
            f"{i}.{field.name}": getattr(answer, field.name).contiguous()
            for i, answer in enumerate(self.answers)
            for field in fields(Answer)
        }
        about = {"shape": vars(self.shape), "vocab_size": self.vocab_size, "names": self.names}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.tmp")
        save_file(tensors, scratch, metadata={"about": json.dumps(about)})
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> Recording:
        if not path.is_file():
            raise ValueError(f"no recording at {path}: make one with `sgl-graft bench record`")
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            names = tuple((dataset, index) for dataset, index in about["names"])
            answers = tuple(
                Answer(**{field.name: file.get_tensor(f"{i}.{field.name}") for field in fields(Answer)})
                for i in range(len(names))
            )
        return cls(Shape(**about["shape"]), about["vocab_size"], names, answers)

    @classmethod
    def load_all(cls, files: str) -> Recording:
        """Comma-separated files as one recording."""
        return cls.join([cls.load(Path(part.strip())) for part in files.split(",")])

    @classmethod
    def join(cls, parts: Sequence[Recording]) -> Recording:
        """Recordings of the same draft and shape, one after the other."""
        first = parts[0]
        for part in parts:
            if (part.shape, part.vocab_size) != (first.shape, first.vocab_size):
                raise ValueError(
                    f"recordings of shapes {first.shape} and {part.shape} cannot be replayed together: "
                    "record both with the same steps, topk and slots"
                )
        names = tuple(name for part in parts for name in part.names)
        return cls(first.shape, first.vocab_size, names, tuple(a for part in parts for a in part.answers))
