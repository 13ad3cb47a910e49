"""The learner's process: ``python -m sgl_graft.specblock.adaptation.child AREA``.

It reads jobs from its standard input and answers on its standard output; AREA is the descriptor of the buffer
into which it puts weights. It ends when its input does, so it never outlives the server. Nothing that happens
here reaches the server but an answer, a wrong one or none.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import LlamaConfig

from ...draft_training.vocab import DraftVocab
from ..model import SpecBlockDraft
from . import store, wire
from .bandit import FULL
from .collect import Heads, Segment
from .learner import Learner, LearnSettings
from .weights import WeightArea


class Pace:
    """Sleeps so that this process computes a share of the time, at most."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.begin()

    def begin(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def __call__(self) -> None:
        due = (time.process_time() - self._cpu) / self.share - (time.monotonic() - self._wall)
        if due > 0:
            time.sleep(due)


def main(area: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
    torch.set_num_threads(1)
    header, tensors = wire.receive(stdin)
    os.nice(header["nice"])
    draft = SpecBlockDraft(LlamaConfig(**header["config"]))
    vocab = DraftVocab.of(tensors["draft_to_target"], draft.config.vocab_size)
    pace = Pace(header["share"])
    learner = Learner(draft, vocab, LearnSettings(**header["learning"]), pace)
    published = WeightArea.shared(draft, area)
    learner.load(published.views)
    while True:
        header, tensors = wire.receive(stdin)
        pace.begin()
        match header["job"]:
            case "update":
                update = _update(learner, header["arm"], tensors)
                published.read_from(draft)
                wire.send(stdout, {"update": asdict(update)})
            case "undo":
                learner.undo()
            case "reset":
                own = WeightArea.private(draft)
                own.flat.copy_(tensors["weights"])
                learner.load(own.views)
            case "save":
                _save(header, tensors["weights"])


def _update(learner: Learner, arm: str, tensors: dict[str, Tensor]) -> Any:
    learn, held = (_pieces(arm, tensors, prefix) for prefix in ("learn", "held"))
    return learner.full(learn, held) if arm == FULL else learner.head(learn, held)


def pack(arm: str, prefix: str, pieces: list[Any]) -> dict[str, Tensor]:
    """Evidence as named tensors; see :func:`_pieces`."""
    packed: dict[str, Tensor] = {}
    for i, piece in enumerate(pieces):
        for name, value in piece._asdict().items():
            packed[f"{prefix}.{i}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return packed


def _pieces(arm: str, tensors: dict[str, Tensor], prefix: str) -> list[Any]:
    kind: Any = Segment if arm == FULL else Heads
    pieces: list[Any] = []
    while f"{prefix}.{len(pieces)}.{kind._fields[0]}" in tensors:
        found = {name: tensors[f"{prefix}.{len(pieces)}.{name}"] for name in kind._fields}
        pieces.append(kind(**found)._replace(**({"answer": int(found["answer"])} if arm == FULL else {})))
    return pieces


def _save(header: dict[str, Any], flat: Tensor) -> None:
    try:
        store.save(Path(header["folder"]), flat, header["version"], header["base"], header["bandit"])
    except (OSError, SafetensorError) as error:  # the latter is what a full disk gives
        print(f"SPECBLOCK could not save adapted weights, the last saved ones are intact: {error}")


if __name__ == "__main__":
    apart = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    with contextlib.suppress(EOFError, BrokenPipeError), os.fdopen(apart, "wb") as answers:
        main(int(sys.argv[1]), sys.stdin.buffer, answers)  # until the server is gone
