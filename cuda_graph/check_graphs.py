"""Capture a whole round in a CUDA graph, replay it with padded rows full of garbage, and compare the live
rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .buffers import CapturedGraph, ChainInputs, GraftBuffers
from .check_cases import Round, readable
from .check_compare import Comparison, compare_tensors
from .coupled import AcceptedPath, walk_accepted
from .dispatch import forced_backend
from .eagle_tree import DraftPool
from .fork import fork
from .select import GraftedTree
from .successor_table import SuccessorTable
from .table_update import accepted_slots, update_from_logits
from .tree_links import TreeLinks, tree_links


def check_graph(case: Round, rule: str) -> list[Comparison]:
    """Compare replays for a full and a half-empty batch with the reference run on the live rows alone."""
    shape = case.shape
    buffers = GraftBuffers.create(shape.batch, case.pool.tokens.shape[1], case.root_tokens.device)
    buffers.load(_live_inputs(case, shape.batch))
    table = case.copy_of_table()
    with forced_backend("triton"):
        graph = CapturedGraph(buffers, lambda: _one_round(case, buffers, table, rule))
        comparisons = []
        for live in sorted({shape.batch, (shape.batch + 1) // 2}):
            _restore(table, case.table)
            spoil(buffers)
            (tree, links, path), _ = graph.replay(buffers.load(_live_inputs(case, live)))
            result = [*_live_rows(tree, links, path, live), *(part.clone() for part in readable(table))]
            name = f"{rule} graph, batch {shape.batch}, slots {shape.slots}, {live} live"
            comparisons.append(compare_tensors(name, _reference(case, rule, live), result))
    return comparisons


def spoil(buffers: GraftBuffers) -> None:
    """Fill every buffer with what a bug might leave there."""
    for tensor in (buffers.root_tokens, buffers.contexts, buffers.table_index):
        tensor.fill_(2**40)
    buffers.pool.tokens.fill_(-7)
    buffers.pool.parents.fill_(2**40)
    buffers.pool.scores.fill_(float("nan"))


def _one_round(
    case: Round, buffers: GraftBuffers, table: SuccessorTable, rule: str
) -> tuple[GraftedTree, TreeLinks, AcceptedPath]:
    """Retrieve, graft, link, walk and update, all from the buffers."""
    batch = buffers.max_batch
    tree = graft(case, table, buffers, buffers.pool, rule)
    links = tree_links(tree.parents, buffers.seq_lens)
    path = walk_accepted(tree.tokens, tree.parents, case.targets[:batch], case.chain.max_path)
    update_from_logits(
        table,
        buffers.table_index,
        tree.tokens,
        tree.parents,
        tree.depths,
        buffers.contexts,
        accepted_slots(path.accept_index, case.shape.slots),
        case.logits[: batch * case.shape.slots],
    )
    return tree, links, path


def graft(
    case: Round, table: SuccessorTable, rows: GraftBuffers | Round, pool: DraftPool, rule: str
) -> GraftedTree:
    """Retrieval beside the gate, then one selection rule: `staged`, or `value` without calibration."""
    chain, roots = case.chain, rows.root_tokens
    beside = fork(lambda: chain.retrieve(table, rows.table_index, roots, rows.contexts), roots.device)
    if rule == "staged":
        stage = chain.stage(pool.scores, case.thresholds)  # in a server the draft steps run here
        return chain.graft_staged(pool, beside.join(), roots, stage)
    return chain.graft_value(pool, beside.join(), roots, case.maps)


def _reference(case: Round, rule: str, live: int) -> list[Tensor]:
    """The same round from torch operations, without padding or graph."""
    buffers = GraftBuffers.create(live, case.pool.tokens.shape[1], case.root_tokens.device)
    buffers.load(_live_inputs(case, live))
    table = case.copy_of_table()
    with forced_backend("torch"):
        tree, links, path = _one_round(case, buffers, table, rule)
    return [*_live_rows(tree, links, path, live), *readable(table)]


def _live_inputs(case: Round, live: int) -> ChainInputs:
    return ChainInputs(
        root_tokens=case.root_tokens[:live],
        contexts=case.contexts[:live],
        table_index=case.table_index[:live],
        seq_lens=case.seq_lens[:live],
        pool=DraftPool(*(tensor[:live] for tensor in case.pool)),
    )


def _live_rows(tree: GraftedTree, links: TreeLinks, path: AcceptedPath, live: int) -> Sequence[Tensor]:
    """Every output cut to the live requests; flat ones hold the requests end to end."""
    batch = tree.tokens.shape[0]
    flat = (links.tree_mask, links.positions, path.predicts)
    by_row = (*tree, *links[2:], path.accept_index, path.num_correct_drafts, path.bonus_tokens)
    return [t.view(batch, -1)[:live].clone() for t in flat] + [t[:live].clone() for t in by_row]


def _restore(table: SuccessorTable, source: SuccessorTable) -> None:
    table.tokens.copy_(source.tokens)
    table.probs.copy_(source.probs)
    table.tags.copy_(source.tags)
