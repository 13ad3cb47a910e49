"""Dialogues on disk: token ids, answer ranges and sources, in one compressed file or a folder of shards."""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import numpy as np

SUFFIX = ".dialogues.xz"
FORMAT_VERSION = 1


@dataclass
class Dialogue:
    """Token ids, the half-open ranges in them that are the assistant's answers, and the prompt's origin.

    `index` is the script's number in its run, so that an interrupted run knows what is done.
    """

    ids: list[int]
    answers: list[tuple[int, int]]
    source: str
    index: int = -1

    @property
    def num_answer_tokens(self) -> int:
        return sum(end - start for start, end in self.answers)


@dataclass
class DialogueFile:
    """What one file holds: `header` describes target, tokenizer and command."""

    dialogues: list[Dialogue]
    header: dict[str, object] = field(default_factory=dict)


def save(path: Path, dialogues: Sequence[Dialogue], header: dict[str, object] | None = None) -> None:
    """Write one file atomically. Raises ValueError for an empty list."""
    if not dialogues:
        raise ValueError(f"no dialogues to write to {path}")
    sources = sorted({d.source for d in dialogues})
    highest = max(max(d.ids) for d in dialogues)
    answers = [[i, start, end] for i, d in enumerate(dialogues) for start, end in d.answers]
    buffer = io.BytesIO()
    np.savez(
        buffer,
        ids=np.concatenate([d.ids for d in dialogues]).astype(np.uint16 if highest < 1 << 16 else np.uint32),
        lengths=np.array([len(d.ids) for d in dialogues], np.uint32),
        answers=np.array(answers, np.uint32).reshape(-1, 3),
        sources=np.array([sources.index(d.source) for d in dialogues], np.uint16),
        indices=np.array([d.index for d in dialogues], np.int64),
        header=np.frombuffer(
            json.dumps({"format": FORMAT_VERSION, "sources": sources, **(header or {})}).encode(), np.uint8
        ),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_bytes(lzma.compress(buffer.getvalue(), preset=6))
    scratch.replace(path)


def load(path: Path) -> DialogueFile:
    """Read one file. Raises ValueError for another format version."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
        header = json.loads(arrays["header"].tobytes())
        if header.get("format") != FORMAT_VERSION:
            raise ValueError(
                f"{path} has dialogue format {header.get('format')!r}, this version reads {FORMAT_VERSION}: "
                "generate it again"
            )
        ends = np.cumsum(arrays["lengths"], dtype=np.int64)
        ids = arrays["ids"]
        dialogues = [
            Dialogue(ids[end - length : end].tolist(), [], header["sources"][source], int(index))
            for end, length, source, index in zip(
                ends, arrays["lengths"].astype(np.int64), arrays["sources"], arrays["indices"], strict=True
            )
        ]
        for i, start, end in arrays["answers"].tolist():
            dialogues[i].answers.append((start, end))
    return DialogueFile(dialogues, header)


def load_all(paths: Iterable[Path]) -> list[Dialogue]:
    """Dialogues of files and of every shard in folders, in name order. Raises ValueError when empty."""
    files: list[Path] = []
    for path in paths:
        files += [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))
    found = [d for file in files for d in load(file).dialogues]
    if not found:
        raise ValueError(f"no dialogues in {[str(p) for p in paths]}: run `sgl-graft train data` first")
    return found


def shipped(target: str) -> Path:
    """The dialogues that ship with the package for a named target (the file may not exist)."""
    return Path(str(resources.files("sgl_graft"))) / "drafts" / "dialogues" / f"{target}{SUFFIX}"


def shipped_openings(
    target: str, count: int, *, newest: bool = False
) -> list[tuple[str, int, tuple[int, ...]]]:
    """Prompts of the shipped dialogues, an equal share of every source: (source, number in it, token ids).

    Args:
        newest: those added last, which a draft trained before has not seen.

    Raises:
        ValueError: no dialogues ship for this target.
    """
    path = shipped(target)
    if not path.is_file():
        raise ValueError(f"no training prompts ship for {target}: name a JSONL file with --prompts")
    by_source: dict[str, list[tuple[str, int, tuple[int, ...]]]] = {}
    for dialogue in load(path).dialogues:
        found = by_source.setdefault(dialogue.source, [])
        found.append((dialogue.source, len(found), tuple(dialogue.ids[: dialogue.answers[0][0]])))
    share = -(-count // len(by_source))
    ends = slice(-share, None) if newest else slice(share)
    return [opening for source in sorted(by_source) for opening in by_source[source][ends]][:count]
