"""Times of each op inside a CUDA graph, beside what a large copy achieves on the same device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .check_cases import TABLE_K, Round
from .check_graphs import graft
from .coupled import walk_accepted
from .eagle_tree import draft_pool
from .gate import path_confidence, staged_gate
from .merge import merge_trie
from .select import select_tree
from .staged_rule import staged_weights
from .table_update import write_successors
from .top_successors import top_successors
from .tree_links import tree_links
from .value_rule import DRAFT, TABLE, value_weights

CALLS_PER_GRAPH = 20
REPLAYS = 10
COPY_BYTES = 2**30

# Targets on an H200 (issue 2): the chain at batch 16 and 16 slots, and the table update against one read.
CHAIN_TARGET_US = 60.0
UPDATE_TARGET_READS = 1.3


@dataclass(frozen=True)
class Times:
    """Microseconds per call at one shape."""

    batch: int
    slots: int
    micros: dict[str, float]
    logits_read_us: float  # one read of the logits at the copy's bandwidth


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large device copy moves, reads and writes counted."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (graph_micros(lambda: target.copy_(source), calls=4) * 1e-6)


def graph_micros(run: Callable[[], object], calls: int = CALLS_PER_GRAPH) -> float:
    """Microseconds per call: `calls` calls in one graph, replayed several times between two events."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (REPLAYS * calls)


def time_round(case: Round, bandwidth: float) -> Times:
    """Time every op of a round, both rules' whole chains, and the table update."""
    calls = timed_calls(case)
    logits_bytes = case.logits.numel() * case.logits.element_size()
    return Times(
        batch=case.shape.batch,
        slots=case.shape.slots,
        micros={name: graph_micros(run) for name, run in calls.items()},
        logits_read_us=logits_bytes / bandwidth * 1e6,
    )


def timed_calls(case: Round) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    chain, table, layout = case.chain, case.table, case.chain.layout
    rows = (case.table_index, case.root_tokens, case.contexts)
    pool = case.pool
    retrieved = chain.retrieve(table, *rows)
    confidence = path_confidence(pool.scores, chain.topk, chain.steps)
    stage = chain.stage(pool.scores, case.thresholds)
    staged = staged_weights(chain.stages, layout, stage, pool.tokens, pool.scores, retrieved.tokens)
    maps = case.maps
    candidates = (pool.tokens, pool.parents, staged[0], retrieved.tokens, staged[1])
    trie = merge_trie(layout, *candidates)
    tree = select_tree(layout, trie, case.root_tokens, case.shape.slots)
    best = top_successors(case.logits, TABLE_K, case.shape.vocab)
    written = (case.table_index, tree.tokens, tree.parents, tree.depths, case.contexts, case.accepted)

    def whole(rule: str) -> Callable[[], object]:
        def run() -> object:
            grafted = graft(case, table, case, draft_pool(*case.lists), rule)
            return tree_links(grafted.parents, case.seq_lens)

        return run

    def update() -> None:
        write_successors(table, *written, top_successors(case.logits, TABLE_K, case.shape.vocab))

    checkpoints = chain.stages.plan.checkpoints
    return {
        "draft_pool": lambda: draft_pool(*case.lists),
        "path_confidence": lambda: path_confidence(pool.scores, chain.topk, chain.steps),
        "staged_gate": lambda: staged_gate(confidence, checkpoints, case.thresholds),
        "retrieve": lambda: chain.retrieve(table, *rows),
        "value_weights draft": lambda: value_weights(
            maps, DRAFT, layout.pool_depths, pool.scores, pool.tokens
        ),
        "value_weights table": lambda: value_weights(
            maps, TABLE, layout.retrieved_depths, retrieved.probs, retrieved.tokens
        ),
        "staged_weights": lambda: staged_weights(
            chain.stages, layout, stage, pool.tokens, pool.scores, retrieved.tokens
        ),
        "merge_trie": lambda: merge_trie(layout, *candidates),
        "select_tree": lambda: select_tree(layout, trie, case.root_tokens, case.shape.slots),
        "tree_links": lambda: tree_links(tree.parents, case.seq_lens),
        "walk_accepted": lambda: walk_accepted(tree.tokens, tree.parents, case.targets, chain.max_path),
        "top_successors": lambda: top_successors(case.logits, TABLE_K, case.shape.vocab),
        "write_successors": lambda: write_successors(table, *written, best),
        "chain staged": whole("staged"),
        "chain value": whole("value"),
        "table update": update,
    }
