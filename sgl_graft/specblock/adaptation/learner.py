"""The copy of the draft that learns. No engine, no server: tensors in, weights and figures out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...draft_training.features import Sample
from ...draft_training.specblock_loss import prefix_mask
from ...draft_training.specblock_recipe import SpecBlockRecipe, SpecBlockSettings
from ...draft_training.specblock_unroll import BlockRows, unroll
from ...draft_training.vocab import DraftVocab
from ..model import SpecBlockDraft
from .bandit import FULL, HEAD
from .collect import Heads, Segment

HEAD_PARAMETERS = ("lm_head.", "rank_head.")
SIBLINGS = 4  # a miss still commits one token more when it is among so many


@dataclass(frozen=True)
class LearnSettings:
    """
    Attributes:
        full_rate, head_rate: learning rates (AdamW) of the two kinds of update.
        step_rows: answer rows, or verifies, that one step learns from.
        clip: norm that a step's gradient is cut to.
        bf16: matrix products of full updates in bfloat16.
    """

    full_rate: float = 2e-4
    head_rate: float = 2e-4
    step_rows: int = 128
    clip: float = 1.0
    bf16: bool = True


@dataclass(frozen=True)
class Update:
    """What one update did.

    Attributes:
        before, after: tokens that a verify would commit on held rows, by the weights before and after.
        seconds: of this thread's CPU time, judging included.
    """

    arm: str
    before: float
    after: float
    seconds: float
    steps: int

    @property
    def gain(self) -> float:
        """Share by which accepts get longer; NaN for weights that are none any more."""
        return self.after / self.before - 1 if self.before > 0 else math.nan


def parameters_of(draft: SpecBlockDraft, arm: str) -> dict[str, torch.nn.Parameter]:
    """The weights that an update of this kind changes."""
    named = dict(draft.named_parameters())
    return named if arm == FULL else {n: p for n, p in named.items() if n.startswith(HEAD_PARAMETERS)}


class Learner:
    """Holds the learning copy, and the weights before its last update.

    Args:
        draft: fp32, changed in place.
        breathe: called between steps; the caller's place to sleep, so that learning takes its share only.
    """

    def __init__(
        self,
        draft: SpecBlockDraft,
        vocab: DraftVocab,
        settings: LearnSettings,
        breathe: Callable[[], None] = lambda: None,
    ) -> None:
        self.draft, self.vocab, self.settings, self.breathe = draft, vocab, settings, breathe
        unused = torch.zeros(1, draft.config.hidden_size)
        self.recipe = SpecBlockRecipe(draft, unused, vocab, SpecBlockSettings(blocks=2, bf16=settings.bf16))
        self.random = torch.Generator().manual_seed(0)
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._undo: dict[str, Tensor] = {}

    def full(self, learn: Sequence[Segment], held: Sequence[Segment]) -> Update:
        """Update every weight by the segments `learn`."""
        return self._update(
            FULL,
            parts=lambda: _parts(learn, lambda s: len(s.tokens) - s.answer, self.settings.step_rows),
            loss=self._segment_loss,
            judge=lambda: self.judge_segments(held),
        )

    def head(self, learn: Sequence[Heads], held: Sequence[Heads]) -> Update:
        """Update LM head and rank head by what block 1 proposed in served rounds: no forward is run."""
        return self._update(
            HEAD,
            parts=lambda: _parts(learn, lambda h: len(h.wanted), self.settings.step_rows),
            loss=self._head_loss,
            judge=lambda: self.judge_heads(held),
        )

    def undo(self) -> None:
        """Take the last update back, with what the optimizers remember."""
        own = dict(self.draft.named_parameters())
        with torch.no_grad():
            for name, value in self._undo.items():
                own[name].copy_(value)
        self._undo = {}
        self._optimizers = {}

    def load(self, weights: dict[str, Tensor]) -> None:
        """Start over from these weights."""
        own = dict(self.draft.named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
        self._undo, self._optimizers = {}, {}

    @torch.no_grad()
    def judge_segments(self, held: Sequence[Segment]) -> float:
        """Mean tokens that a verify of block 1 would commit; 0 without rows."""
        total, rows = 0.0, 0
        for part in _parts(held, lambda s: len(s.tokens) - s.answer, 512):
            samples = self._samples(part)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.bf16):
                (block,) = unroll(self.draft, samples, self.recipe.embedding, 1, torch.zeros_like)  # type: ignore[arg-type]
            wanted = self._wanted(samples, block)
            total += float(self._committed(self.draft.norm(block.hidden), wanted).sum())
            rows += len(wanted)
            self.breathe()
        return total / rows if rows else 0.0

    @torch.no_grad()
    def judge_heads(self, held: Sequence[Heads]) -> float:
        """The same, of the rows that block 1 proposed while serving."""
        total, rows = 0.0, 0
        for part in _parts(held, lambda h: len(h.wanted), 512):
            hidden, wanted = self._joined(part)
            total += float(self._committed(self.draft.norm(hidden), wanted).sum())
            rows += len(wanted)
        return total / rows if rows else 0.0

    # ---- inside ----------------------------------------------------------------------------------------

    def _update(
        self,
        arm: str,
        parts: Callable[[], Iterator[list[Any]]],
        loss: Callable[[list[Any]], Tensor],
        judge: Callable[[], float],
    ) -> Update:
        started, steps = time.thread_time(), 0
        before = judge()
        changed = parameters_of(self.draft, arm)
        self._undo = {name: p.detach().clone() for name, p in changed.items()}
        params = list(changed.values())
        optimizer = self._optimizer(arm, params)
        for part in parts():
            value = loss(part)
            if not value.requires_grad:  # nothing in it that the draft could have proposed
                continue
            grads = torch.autograd.grad(value, params, allow_unused=True)
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            torch.nn.utils.clip_grad_norm_(params, self.settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            self.breathe()
        return Update(arm, before, judge(), time.thread_time() - started, steps)

    def _optimizer(self, arm: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if arm not in self._optimizers:
            rate = self.settings.full_rate if arm == FULL else self.settings.head_rate
            self._optimizers[arm] = torch.optim.AdamW(
                params, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            )
        return self._optimizers[arm]

    def _segment_loss(self, part: list[Segment]) -> Tensor:
        samples = self._samples(part)
        return self.recipe.loss(samples, sum(len(s.rows) for s in samples), self.random)

    def _head_loss(self, part: list[Heads]) -> Tensor:
        hidden, wanted = self._joined(part)
        rows, size = wanted.shape
        block = BlockRows(
            hidden,
            target=torch.arange(rows * size).view(rows, size),
            valid=wanted > -2,
            first=torch.arange(rows),
        )
        flat = wanted.flatten().unsqueeze(1)  # [rows * K, 1]
        return self.recipe._block_loss(block, flat.clamp_min(0), (flat >= 0).float())

    def _joined(self, part: Sequence[Heads]) -> tuple[Tensor, Tensor]:
        """Hidden states `[verifies, K, hidden]`, and the wanted tokens `[verifies, K]` as draft ids: -1 where
        the draft has no such token, -2 where nobody knows."""
        wanted = torch.cat([h.wanted for h in part])
        known = self.vocab.target_to_draft[wanted.clamp_min(0)]
        return torch.cat([h.hidden for h in part]).float(), torch.where(wanted < 0, -2, known)

    def _samples(self, part: Sequence[Segment]) -> list[Sample]:
        """Segments as the trainer's samples. Embeddings come along, so ids only number them."""
        embeds, samples, place = [], [], 0
        for segment in part:
            count = len(segment.tokens)
            # Position p's own token is the one after row p - 1.
            embeds += [torch.zeros_like(segment.embeds[:1]), segment.embeds[:-1]]
            rows = torch.arange(segment.answer, count)
            tokens = segment.tokens[segment.answer :].long().unsqueeze(1)
            samples.append(
                Sample(
                    ids=torch.arange(place, place + count),
                    features=segment.features,
                    rows=rows,
                    top_ids=tokens,
                    top_probs=torch.ones_like(tokens, dtype=torch.float32),
                    source="served",
                )
            )
            place += count
        self.recipe.embedding = torch.cat(embeds).to(self.recipe.dtype)
        return samples

    def _wanted(self, samples: Sequence[Sample], block: BlockRows) -> Tensor:
        """Draft ids `[rows, K]` as :meth:`_joined` gives them."""
        known = self.vocab.target_to_draft[torch.cat([s.top_ids for s in samples])[:, 0]]
        return torch.where(block.valid, known[block.target.clamp_max(len(known) - 1)], -2)

    def _committed(self, normed: Tensor, wanted: Tensor) -> Tensor:
        """Tokens `[rows]` of the likeliest path and one sibling behind it, bonus included; normed
        `[rows, K, hidden]`."""
        logits = torch.nn.functional.linear(
            normed.to(self.recipe.dtype), self.draft.lm_head.weight.to(self.recipe.dtype)
        ).float()
        # Weights that are no numbers any more propose nothing.
        best = logits.nan_to_num(float("-inf")).topk(min(SIBLINGS, logits.shape[-1]), dim=-1).indices
        finite = logits.isfinite().all(-1)
        hits = (best == wanted.unsqueeze(-1)) & finite.unsqueeze(-1)  # [rows, K, siblings]
        valid = torch.ones_like(finite)
        straight = (hits[..., 0].cummin(1).values).sum(1)
        at_miss = prefix_mask(hits[..., 0], valid) & ~hits[..., 0]  # the first slot that missed
        return 1 + straight + (at_miss & hits.any(-1)).sum(1)


def _parts(pieces: Sequence[Any], size_of: Callable[[Any], int], most: int) -> Iterator[list[Any]]:
    """Pieces in lists of about `most` rows."""
    part: list[Any] = []
    rows = 0
    for piece in pieces:
        part.append(piece)
        rows += size_of(piece)
        if rows >= most:
            yield part
            part, rows = [], 0
    if part:
        yield part
