"""The training loop every draft shares: batches in, a checkpoint and an exported draft out.

A recipe supplies the module, the loss of a part of a batch, the held-out evaluation and the export. The loop
splits each batch over single-threaded workers (see `make_data` for why), sums their gradients in a fixed
order, and keeps an exponential moving average of the weights, so that an export at any step is usable.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sgl_graft.draft_training.features import Sample
from sgl_graft.draft_training.feed import Feed


class Recipe(Protocol):
    """What one kind of draft adds to the loop."""

    @property
    def module(self) -> nn.Module: ...

    def loss(self, samples: Sequence[Sample], denominator: int, random: torch.Generator) -> Tensor:
        """Scalar loss of a part of a batch; the parts' losses add up to the batch's. `denominator` is the
        number of target rows in the whole batch."""
        ...

    def evaluate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Held-out figures; `chain` is the one the log line shows."""
        ...

    def export(self, folder: Path) -> None:
        """Write the module as a draft SGLang loads."""
        ...


@dataclass(frozen=True)
class TrainSettings:
    """`decay_steps` of linear decay end the run; before them the rate is constant after `warmup`, so that a
    run can be continued with a larger `steps` without having cooled down."""

    steps: int = 1500
    lr: float = 6e-4
    warmup: int = 40
    decay_steps: int = 300
    final_lr_share: float = 0.05
    weight_decay: float = 0.02
    clip: float = 1.0
    ema: float = 0.99
    threads: int = 2
    seed: int = 0
    eval_every: int = 100
    save_every: int = 100
    refresh_every: int = 20
    held_out: int = 48

    def rate(self, step: int) -> float:
        """Learning rate of 0-based `step`."""
        left = self.steps - step
        cool = self.final_lr_share + (1 - self.final_lr_share) * min(1.0, left / max(1, self.decay_steps))
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup)) * cool


class Trainer:
    """Runs `recipe` on `feed`, keeping everything it needs to continue in `folder`."""

    def __init__(self, recipe: Recipe, feed: Feed, folder: Path, settings: TrainSettings) -> None:
        self.recipe, self.feed, self.folder, self.settings = recipe, feed, folder, settings
        self.params = [p for p in recipe.module.parameters() if p.requires_grad]
        self.average = [p.detach().clone() for p in self.params]
        decayed = [p for p in self.params if p.ndim > 1]
        plain = [p for p in self.params if p.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
        self.step = 0
        self.seconds = 0.0
        self.targets_seen = 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def resume(self) -> bool:
        """Load the checkpoint if there is one."""
        if not self.checkpoint.is_file():
            return False
        state = torch.load(self.checkpoint, weights_only=True)
        with torch.no_grad():
            for param, value in zip(self.params, state["params"], strict=True):
                param.copy_(value)
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.targets_seen = state["step"], state["seconds"], state["targets_seen"]
        self.feed.restore(state["feed"])
        return True

    def save(self) -> None:
        """Write the checkpoint atomically."""
        state = {
            "params": [p.detach() for p in self.params],
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "targets_seen": self.targets_seen,
            "feed": self.feed.state(),
        }
        scratch = self.checkpoint.with_suffix(".tmp")
        torch.save(state, scratch)
        scratch.replace(self.checkpoint)

    def run(self, report: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Train to `settings.steps`. `report` gets a dict per step, with `held_out` after an evaluation."""
        settings = self.settings
        self.feed.refresh()
        with ThreadPoolExecutor(settings.threads) as pool:
            while self.step < settings.steps:
                started = time.monotonic()
                if self.step % settings.refresh_every == 0:
                    self.feed.refresh()
                record = self._train_step(pool)
                self.seconds += time.monotonic() - started
                record |= {"seconds": round(self.seconds, 1), "targets_seen": self.targets_seen}
                if self.step % settings.eval_every == 0 or self.step == settings.steps:
                    record["held_out"] = self.evaluate_and_export()
                if self.step % settings.save_every == 0 or self.step == settings.steps:
                    self.save()
                with (self.folder / "log.jsonl").open("a") as log:
                    log.write(json.dumps(record) + "\n")
                if report is not None:
                    report(record)

    def evaluate_and_export(self) -> dict[str, Any]:
        """Held-out figures of the averaged weights, which are also exported to `folder/export`."""
        live = [p.detach().clone() for p in self.params]
        self._load(self.average)
        try:
            figures = self.recipe.evaluate(self.feed.held_out(self.settings.held_out))
            scratch, final, old = (self.folder / name for name in (".export", "export", ".export-old"))
            self.recipe.export(scratch)
            if final.exists():
                final.rename(old)
            scratch.rename(final)
            for file in old.glob("*") if old.exists() else ():
                file.unlink()
            if old.exists():
                old.rmdir()
        finally:
            self._load(live)
        return figures

    def _train_step(self, pool: ThreadPoolExecutor) -> dict[str, Any]:
        settings = self.settings
        batch = self.feed.next_batch()
        denominator = sum(len(s.rows) for s in batch)
        parts = [p for p in split_evenly(batch, settings.threads) if p]
        jobs = [pool.submit(self._part, part, denominator, i) for i, part in enumerate(parts)]
        results = [job.result() for job in jobs]
        for i, param in enumerate(self.params):
            param.grad = results[0][1][i]
            for _, grads in results[1:]:
                param.grad += grads[i]
        norm = torch.nn.utils.clip_grad_norm_(self.params, settings.clip)
        rate = settings.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.targets_seen += denominator
        # A young average follows closely: with a fixed factor it would remember the initial weights.
        factor = min(settings.ema, self.step / (self.step + 10))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.params], 1 - factor)
        loss = sum(value for value, _ in results)
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {self.step}: lower --lr and resume")
        return {
            "step": self.step,
            "epoch": self.feed.epoch,
            "loss": round(loss, 4),
            "grad_norm": round(float(norm), 3),
        }

    def _part(self, samples: list[Sample], denominator: int, part: int) -> tuple[float, tuple[Tensor, ...]]:
        torch.set_num_threads(1)
        random = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.step * 64 + part)
        loss = self.recipe.loss(samples, denominator, random)
        return float(loss.detach()), torch.autograd.grad(loss, self.params)

    @torch.no_grad()
    def _load(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self.params, values, strict=True):
            param.copy_(value)


def split_evenly(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Samples in `parts` lists of about equal target rows: longest first, into the shortest list."""
    lists: list[list[Sample]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for sample in sorted(samples, key=lambda s: -len(s.rows)):
        shortest = sizes.index(min(sizes))
        lists[shortest].append(sample)
        sizes[shortest] += len(sample.rows)
    return lists
