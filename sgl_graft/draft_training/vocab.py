"""The draft vocabulary: which target tokens a draft can propose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_graft.draft_training.dialogues import Dialogue


@dataclass(frozen=True)
class DraftVocab:
    """`draft_to_target` `[draft_vocab]` ascending target ids; `target_to_draft` `[vocab]`, -1 if absent."""

    draft_to_target: Tensor
    target_to_draft: Tensor

    @classmethod
    def of(cls, tokens: Tensor, vocab_size: int) -> DraftVocab:
        """From target ids `[draft_vocab]` in any order. Raises ValueError for repeats or ids out of range."""
        draft_to_target = tokens.long().sort().values
        if (
            len(draft_to_target.unique()) != len(tokens)
            or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size
        ):
            raise ValueError(f"draft vocabulary must be distinct ids below {vocab_size}")
        target_to_draft = torch.full((vocab_size,), -1)
        target_to_draft[draft_to_target] = torch.arange(len(draft_to_target))
        return cls(draft_to_target, target_to_draft)

    @property
    def offsets(self) -> Tensor:
        """`d2t` as EAGLE-3 checkpoints store it: target id minus draft id, `[draft_vocab]`."""
        return self.draft_to_target - torch.arange(len(self.draft_to_target))

    @property
    def members(self) -> Tensor:
        """`t2d` as EAGLE-3 checkpoints store it: `[vocab]` bool."""
        return self.target_to_draft >= 0


def choose(
    dialogues: Iterable[Dialogue], size: int, vocab_size: int, always: Iterable[int] = ()
) -> DraftVocab:
    """The `size` tokens most frequent in answers, then in whole dialogues, then lowest ids (in a BPE
    vocabulary those were merged first, so they are the most frequent in general text).

    Raises ValueError when `size` exceeds the vocabulary.
    """
    if not 0 < size <= vocab_size:
        raise ValueError(f"draft vocabulary of {size} does not fit a vocabulary of {vocab_size}")
    answers: Counter[int] = Counter()
    everything: Counter[int] = Counter()
    for dialogue in dialogues:
        everything.update(dialogue.ids)
        for start, end in dialogue.answers:
            answers.update(dialogue.ids[start:end])
    ranked = [*always, *(t for t, _ in answers.most_common()), *(t for t, _ in everything.most_common())]
    chosen = list(dict.fromkeys([*ranked, *range(vocab_size)]))[:size]
    return DraftVocab.of(torch.tensor(chosen), vocab_size)
