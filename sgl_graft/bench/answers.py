"""Known answers to replay: a target's greedy ones from a bench's journal, or those of training dialogues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sgl_graft.bench.prompts import Prompt
from sgl_graft.bench.records import CellRecord
from sgl_graft.draft_training.dialogues import Dialogue


@dataclass(frozen=True)
class KnownAnswer:
    dataset: str
    index: int  # row in the prompt file
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def greedy_answers(
    records: Iterable[CellRecord], variant: str, prompts: Mapping[str, Sequence[Prompt]]
) -> list[KnownAnswer]:
    """The variant's greedy answers to these prompts, each once."""
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for record in records:
        cell = record.cell
        if cell.variant == variant and cell.temperature == 0 and cell.dataset in prompts:
            for request in record.requests:
                found.setdefault((cell.dataset, request.index), request.output_ids)
    answers = [
        KnownAnswer(name, prompt.index, prompt.input_ids, found[name, prompt.index])
        for name, dataset in prompts.items()
        for prompt in dataset
        if (name, prompt.index) in found
    ]
    if not answers:
        raise ValueError(f"the journal has no greedy answers of {variant} to these prompts")
    return answers


def dialogue_answers(
    dialogues: Iterable[Dialogue], limit: int, longest: int = 128, shortest: int = 32
) -> list[KnownAnswer]:
    """First answers of dialogues of at least `shortest` tokens, cut to `longest`; sources take turns.

    Some dialogues were sampled; a recorder cuts those where its target would have said something else.
    """
    by_source: dict[str, list[KnownAnswer]] = {}
    for number, dialogue in enumerate(dialogues):
        start, end = dialogue.answers[0]
        if end - start >= shortest:
            tokens = tuple(dialogue.ids[start : min(end, start + longest)])
            answer = KnownAnswer(dialogue.source, number, tuple(dialogue.ids[:start]), tokens)
            by_source.setdefault(dialogue.source, []).append(answer)
    chosen: list[KnownAnswer] = []
    turn = 0
    while len(chosen) < limit and any(turn < len(answers) for answers in by_source.values()):
        chosen += [by_source[source][turn] for source in sorted(by_source) if turn < len(by_source[source])]
        turn += 1
    # The answers of a source stand together, as those of a prompt file do.
    return sorted(chosen[:limit], key=lambda answer: (answer.dataset, answer.index))
