"""What it costs to start with a table that has met other prompts: rows, bytes on disk, seconds to load."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from sgl_graft.bench.recording import Recording
from sgl_graft.bench.replay import Calibrated, Replay, Setting
from sgl_graft.cuda_graph.successor_table import SuccessorTable
from sgl_graft.graft.store import TableIdentity, load_table, save_table

_IDENTITY = TableIdentity("replay", "replay")


def warm_up_cost(setting: Setting, warm_up: Recording, calibrated: Calibrated) -> dict[str, Any]:
    """Replay the setting's warm-up answers, save the table as a server does, and load it again."""
    runner = Replay(setting, warm_up.shape, warm_up.vocab_size, calibrated)
    tokens = 0
    for number in range(setting.warm_up):
        tokens += runner.run("warm-up", number, warm_up.answers[number]).num_tokens
    table = runner.table
    used = table.tokens[:, 0] >= 0  # [rows]
    context = int(used[table.first_context_row : table.empty_row].sum())
    order1 = int(used[: table.first_context_row].sum())
    entry = table.tokens.element_size() + table.probs.element_size()
    row_bytes = (order1 + context) * table.k * entry + context * table.tags.element_size()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.safetensors"
        save_table(table, file, _IDENTITY)
        fresh = SuccessorTable.create(table.vocab_size, table.k, table.num_tables, table.context_rows)
        start = time.monotonic()
        load_table(fresh, file, _IDENTITY)
        load_s = time.monotonic() - start
        file_bytes = file.stat().st_size
    return {
        "answers": setting.warm_up,
        "tokens": tokens,
        "rows": order1 + context,
        "row_bytes": row_bytes,
        "file_bytes": file_bytes,
        "load_s": round(load_s, 4),
    }
