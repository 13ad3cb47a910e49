"""What the tests of GRAFT servers share: a table full of garbage, and one value out of `/metrics`."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from prometheus_client.parser import text_string_to_metric_families
from sgl_graft.cuda_graph.successor_table import SuccessorTable

from sgl_graft.config import TableConfig
from sgl_graft.graft.store import identity_of, save_table

from . import markov
from .server import Server

REPORTED_WITHIN_S = 20.0


def write_garbage_table(path: Path, target: Path) -> Path:
    """A table file that belongs to `target` and holds garbage: successors, ids and probabilities that are
    none."""
    sizes = TableConfig()
    table = SuccessorTable.create(
        markov.VOCAB, sizes.row_width, context_rows=sizes.context_rows, context_len=sizes.context_len
    )
    generator = torch.Generator().manual_seed(30)
    shape = table.tokens.shape
    table.tokens.copy_(torch.randint(-3, markov.VOCAB + 40, shape, generator=generator))
    probs = torch.rand(shape, generator=generator) * 2 - 0.3
    probs[torch.rand(shape, generator=generator) < 0.05] = float("nan")
    probs[torch.rand(shape, generator=generator) < 0.05] = float("inf")
    table.probs.copy_(probs)
    table.tags.copy_(torch.randint(-1, 2**40, table.tags.shape, generator=generator))
    save_table(table, path, identity_of(target))
    return path


def metric(server: Server, name: str, wanted: float, **labels: str) -> float | None:
    """Value of one of our metrics, as soon as it is what is wanted or there was time enough for it."""
    deadline = time.monotonic() + REPORTED_WITHIN_S
    while True:
        found = _sample(server, f"sgl_graft:{name}", labels)
        if found == wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def _sample(server: Server, name: str, labels: dict[str, str]) -> float | None:
    text = server.client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for sample in samples:
        if sample.name == name and labels.items() <= sample.labels.items():
            return float(sample.value)
    return None
