"""Looks for cases that fail and keeps their seeds: ``python -m tests.fuzz.hunt FIRST_SEED CASES [READER]...``

Prints what each reader did wrong, once per kind of mistake, and adds those seeds to ``found.json``, which the
tests run for ever.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path

from .cases import readers, run

FOUND = Path(__file__).with_name("found.json")


def main(first: int, cases: int, names: list[str]) -> None:
    logging.disable(logging.CRITICAL)  # readers warn of every damaged file
    kept: dict[str, list[int]] = json.loads(FOUND.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, reader in readers(folder).items():
            if names and name not in names:
                continue
            kinds: dict[str, int] = {}
            wrong = 0
            for seed in range(first, first + cases):
                mistake = run(reader, folder, seed)
                if mistake is not None:
                    wrong += 1
                    kinds.setdefault(mistake.split(":")[0] + mistake[:50], seed)
            print(f"{name}: {cases} cases, {wrong} failed", *kinds.items(), sep="\n    ", flush=True)
            if kinds:
                kept[name] = sorted({*kept.get(name, []), *kinds.values()})
    FOUND.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
