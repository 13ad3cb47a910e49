"""Deliberate mistakes, one line each, and the fast tests that should notice them.

``python -m tests.mutation.mistakes [NAME]...`` plants them one at a time in a copy of the tree and runs those
tests there. A mistake is caught when they fail. The copy is thrown away; the tree itself is never changed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("sgl_graft", "cuda_graph", "patches", "tests", "pyproject.toml")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Mistake:
    """One replacement in one file; ``old`` occurs there."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MISTAKES = (
    Mistake(
        "stale pad: sequence lengths are not reset",
        "cuda_graph/buffers.py",
        "        self.seq_lens[live:] = 1\n",
        "",
        "tests/field/test_padding.py tests/cuda_graph/test_cg_buffers.py",
    ),
    Mistake(
        "stale pad: draft scores are not reset",
        "cuda_graph/buffers.py",
        "        self.pool.scores[live:] = 0.0\n",
        "",
        "tests/field/test_padding.py tests/cuda_graph/test_cg_buffers.py",
    ),
    Mistake(
        "a ticket is good for two replays",
        "cuda_graph/buffers.py",
        "        self._serial += 1\n        return loaded.live\n",
        "        return loaded.live\n",
        "tests/cuda_graph/test_cg_buffers.py",
    ),
    Mistake(
        "off by one: positions of a tree start one too far",
        "cuda_graph/tree_links.py",
        "depths = attends.sum(-1) - 1",
        "depths = attends.sum(-1)",
        "tests/cuda_graph/test_cg_tree_links.py",
    ),
    Mistake(
        "off by one: ancestors of deep trees are forgotten",
        "cuda_graph/tree_links.py",
        "range((slots - 1).bit_length() - 1)",
        "range((slots - 1).bit_length() - 2)",
        "tests/cuda_graph/test_cg_tree_links.py tests/field/test_widths.py",
    ),
    Mistake(
        "siblings are linked to earlier ones, too",
        "cuda_graph/tree_links.py",
        "later = slot > slot.unsqueeze(1)",
        "later = slot >= slot.unsqueeze(1)",
        "tests/cuda_graph/test_cg_tree_links.py",
    ),
    Mistake(
        "an empty slot may be accepted",
        "cuda_graph/coupled.py",
        "child_of = torch.where(slot > 0, parents, -1)  # [batch, slots]\n    current",
        "child_of = torch.where(slot > 0, parents.clamp_min(0), -1)  # [batch, slots]\n    current",
        "tests/cuda_graph/test_cg_coupled.py",
    ),
    Mistake(
        "off by one: a path is one slot too short",
        "cuda_graph/coupled.py",
        "for _ in range(max_path - 1):",
        "for _ in range(max_path - 2):",
        "tests/cuda_graph/test_cg_coupled.py",
    ),
    Mistake(
        "accepted rows are counted from the wrong request",
        "cuda_graph/coupled.py",
        "torch.where(on_path, accepted + first_row, -1)",
        "torch.where(on_path, accepted, -1)",
        "tests/cuda_graph/test_cg_coupled.py",
    ),
    Mistake(
        "the tree keeps one node too many and one slot empty",
        "cuda_graph/select.py",
        "    kept = min(slots - 1, nodes)\n",
        "    kept = min(slots - 2, nodes)\n",
        "tests/cuda_graph/test_cg_merge_select.py",
    ),
    Mistake(
        "ties prefer the deeper node",
        "cuda_graph/select.py",
        "tie = ((MAX_DEPTH - depths) << TOKEN_BITS)",
        "tie = (depths << TOKEN_BITS)",
        "tests/cuda_graph/test_cg_merge_select.py",
    ),
    Mistake(
        "probabilities that are no numbers are used",
        "cuda_graph/retrieve.py",
        ".float().nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)",
        ".float()",
        "tests/cuda_graph/test_cg_retrieve.py",
    ),
    Mistake(
        "a request reads a table that is not its own",
        "cuda_graph/retrieve.py",
        "index = table_index.clamp(0, table.num_tables - 1).unsqueeze(1)",
        "index = torch.zeros_like(table_index).unsqueeze(1)",
        "tests/cuda_graph/test_cg_retrieve.py",
    ),
    Mistake(
        "padded rows write the table",
        "cuda_graph/table_update.py",
        "in_range = (index >= 0) & (index < table.num_tables)",
        "in_range = index < table.num_tables",
        "tests/cuda_graph/test_cg_table_update.py tests/cuda_graph/test_cg_buffers.py",
    ),
    Mistake(
        "rejected nodes win over accepted ones",
        "cuda_graph/table_update.py",
        "priority = ((~accepted).long() << 48)",
        "priority = (accepted.long() << 48)",
        "tests/cuda_graph/test_cg_table_update.py",
    ),
    Mistake(
        "a row's table is not cleared for its next owner",
        "sgl_graft/graft/tenancy.py",
        "return Assignment(row if settings.enabled else NO_TABLE, clear=row)",
        "return Assignment(row if settings.enabled else NO_TABLE)",
        "tests/graft/test_tenancy.py tests/graft/test_state.py",
    ),
    Mistake(
        "a table is taken from a group that still runs",
        "sgl_graft/graft/tenancy.py",
        "            if table in in_use:\n                continue\n",
        "",
        "tests/graft/test_tenancy.py",
    ),
    Mistake(
        "a saved table is not swapped in whole",
        "sgl_graft/graft/store.py",
        "        temporary.replace(path)\n",
        "        path.write_bytes(temporary.read_bytes())\n",
        "tests/faults/test_state_faults.py tests/graft/test_store.py",
    ),
    Mistake(
        "saved tables can be read by everyone",
        "sgl_graft/graft/store.py",
        "0o600",
        "0o644",
        "tests/graft/test_store.py",
    ),
    Mistake(
        "the missing broadcast: each rank keeps its own tokens",
        "sgl_graft/cpu/agreement.py",
        "group.broadcast(",
        "(lambda tensor, src=0: tensor)(",
        "tests/cpu/test_agreement.py",
    ),
    Mistake(
        "all nodes of a request share the root's noise",
        "sgl_graft/cpu/verify.py",
        "positions.long()[rows]), dim=1)",
        "positions.long()[rows] * 0), dim=1)",
        "tests/cpu/test_verify_distribution.py tests/cpu/test_verify.py",
    ),
    Mistake(
        "a penalised request commits a whole run",
        "sgl_graft/cpu/verify.py",
        "        parents[held] = -1",
        "        pass",
        "tests/cpu/test_verify.py",
    ),
    Mistake(
        "a grammar masks the first node only",
        "sgl_graft/cpu/verify.py",
        "        grammar_mask.apply(logits)",
        "        grammar_mask.apply(logits[:1])",
        "tests/cpu/test_verify.py",
    ),
    Mistake(
        "rows beyond a block may be accepted",
        "sgl_graft/blockpilot/state.py",
        "slot >= block_lens.unsqueeze(1)",
        "slot > block_lens.unsqueeze(1)",
        "tests/blockpilot/test_state.py",
    ),
    Mistake(
        "the next owner of a row keeps the former one's choice",
        "sgl_graft/blockpilot/state.py",
        "        self.own_buf[rows] = own\n",
        "        self.own_buf[rows] |= own\n",
        "tests/blockpilot/test_state.py",
    ),
    Mistake(
        "the load cap forgets to stay",
        "sgl_graft/serving/load_cap.py",
        "wanted != self.slots and self._in_tier >= self._hold",
        "wanted != self.slots",
        "tests/graft/test_load_cap.py",
    ),
    Mistake(
        "the load cap has no hysteresis",
        "sgl_graft/serving/load_cap.py",
        "threshold = 1.0 - self._margin if speculating else 1.0 + self._margin",
        "threshold = 1.0",
        "tests/graft/test_load_cap.py",
    ),
    Mistake(
        "plain rounds overwrite what waits for the draft",
        "sgl_graft/graft/plain_rounds.py",
        "        self._counts[row] = 0\n\n    def counts",
        "        pass\n\n    def counts",
        "tests/graft/test_plain_rounds.py",
    ),
    Mistake(
        "a page goes on one slot too early",
        "sgl_graft/cpu/spec_ops.py",
        "(prefix_lens - 1).clamp(min=0).long()]",
        "prefix_lens.clamp(max=req_to_token.shape[1] - 1).long()]",
        "tests/cpu/test_spec_ops.py",
    ),
)


def copy_tree(to: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
        else:
            shutil.copy(source, to / name)
    # The two rooms that install below sgl_graft; found here before the installed ones.
    for room in ("cuda_graph", "patches"):
        (to / "sgl_graft" / room).symlink_to(to / room)


def plant(file: Path, text: str) -> None:
    """Write a source file so that Python compiles it anew, whatever the clock's steps are."""
    file.write_text(text)
    stamp = time.time_ns() + next(_STEPS) * 10**9
    os.utime(file, ns=(stamp, stamp))


_STEPS = itertools.count(2, 2)


def passes(tree: Path, tests: str) -> tuple[bool | None, str]:
    """Whether the tests pass in that tree, None when they took too long, and the last of what they said."""
    environment = os.environ | {"PYTHONPATH": str(tree), "HYPOTHESIS_STORAGE_DIRECTORY": str(tree / "h")}
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return run.returncode == 0, run.stdout[-1500:]


def main(names: list[str]) -> int:
    missed = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        copy_tree(tree)
        for mistake in MISTAKES:
            if names and not any(name in mistake.name for name in names):
                continue
            file = tree / mistake.file
            right = file.read_text()
            assert mistake.old in right, f"{mistake.name}: {mistake.file} has changed"
            plant(file, right.replace(mistake.old, mistake.new, 1))
            began = time.monotonic()
            survived, said = passes(tree, mistake.tests)
            plant(file, right)
            if survived:
                missed.append(mistake.name)
            first = next((line for line in said.splitlines() if line.startswith("FAILED")), "")
            print(
                {True: "MISSED", False: "caught", None: "too slow to tell"}[survived],
                f"{time.monotonic() - began:5.0f} s ",
                mistake.name,
                first,
                flush=True,
            )
    print(f"{len(missed)} missed: {missed}")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
