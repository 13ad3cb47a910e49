"""A Dockerfile as data: stages, and their instructions in order."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

DOCKER = Path(__file__).parents[2] / "deploy" / "docker"
FILES = ("Dockerfile", "Dockerfile.cpu")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, its `--flags`, and the rest of the line."""

    name: str
    flags: dict[str, str]
    text: str

    @property
    def words(self) -> list[str]:
        """The rest as words: a JSON list as it is, anything else as a shell would split it."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)


@dataclass
class Stage:
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, name: str) -> Instruction:
        return [item for item in self.instructions if item.name == name][-1]

    def environment(self) -> dict[str, str]:
        pairs = [word for item in self.instructions if item.name == "ENV" for word in item.words]
        return dict(pair.split("=", 1) for pair in pairs)


def _logical_lines(text: str) -> list[str]:
    lines, waiting = [], ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or (not waiting and not line.strip()):
            continue
        waiting += line.strip().removesuffix("\\").rstrip() + " "
        if not line.rstrip().endswith("\\"):
            lines.append(waiting.strip())
            waiting = ""
    return lines


def read(name: str) -> list[Stage]:
    """The stages of a Dockerfile of ours, `ARG`s before the first `FROM` filled in with their defaults."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in _logical_lines((DOCKER / name).read_text()):
        instruction, text = line.split(maxsplit=1)
        flags: dict[str, str] = {}
        while text.startswith("--"):
            flag, text = text.split(maxsplit=1)
            key, value = flag.removeprefix("--").split("=", 1)
            flags[key] = value
        if instruction == "ARG" and not stages:
            key, value = text.split("=", 1)
            arguments[key] = value
        elif instruction == "FROM":
            base, *rest = text.split()
            for key, value in arguments.items():
                base = base.replace(f"${{{key}}}", value)
            stages.append(Stage(base, rest[1] if rest else ""))
        else:
            stages[-1].instructions.append(Instruction(instruction, flags, text))
    return stages
