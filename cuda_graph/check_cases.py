"""Random rounds for the GPU check, and every op as a call over such a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .chain import GraftChain
from .coupled import walk_accepted
from .eagle_tree import DraftPool, draft_pool
from .gate import path_confidence, staged_gate
from .merge import merge_trie
from .retrieve import Retrieved
from .select import GraftedTree, select_tree
from .staged_rule import staged_weights
from .stages import paper_stage_plan
from .successor_table import SuccessorTable, next_contexts
from .table_update import update_from_logits
from .top_successors import top_successors
from .tree_links import MAX_BITPACKED_SLOTS, TreeMaskMode, tree_links
from .value_rule import DRAFT, TABLE, ValueMaps, value_weights, weights_to_floats

TABLE_K = 8
ENVELOPE = 48
MAX_SEQ_LEN = 64
Op = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Shape:
    """Sizes of one checked configuration."""

    batch: int
    slots: int
    topk: int
    steps: int
    max_depth: int
    vocab: int
    context_rows: int = 2**16


@dataclass(frozen=True)
class Round:
    """Everything one decoding round reads, at random."""

    shape: Shape
    chain: GraftChain
    lists: tuple[list[Tensor], list[Tensor], list[Tensor]]  # what the drafter collects
    pool: DraftPool
    table: SuccessorTable
    root_tokens: Tensor  # [batch] int64
    contexts: Tensor  # [batch] int64
    table_index: Tensor  # [batch] int64
    seq_lens: Tensor  # [batch] int64
    thresholds: Tensor  # [checkpoints] float32
    maps: ValueMaps  # identity: then both implementations agree to the last bit
    targets: Tensor  # [batch, slots] int64
    accepted: Tensor  # [batch, slots] bool
    logits: Tensor  # [batch * slots, vocab] bfloat16

    def copy_of_table(self) -> SuccessorTable:
        table = self.table
        return replace(table, tokens=table.tokens.clone(), probs=table.probs.clone(), tags=table.tags.clone())


def random_draft(
    seed: int, batch: int, topk: int, steps: int, vocab: int = 50, device: torch.device | str = "cpu"
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What SGLang's `draft_forward` collects (its `select_top_k_tokens`), from random step probabilities."""
    gen = torch.Generator(device).manual_seed(seed)
    score_list, token_list, parents_list = [], [], []
    scores = torch.empty(0)
    for step in range(steps):
        rows = batch if step == 0 else batch * topk
        draws = torch.randn(rows, vocab, generator=gen, device=device)
        probs, index = torch.softmax(draws * 2, -1).topk(topk)
        if step == 0:
            scores = probs
            score_list.append(probs.unsqueeze(1))
            token_list.append(index)
            parents_list.append(torch.arange(-1, topk, device=device).expand(batch, -1))
            continue
        expanded = scores.unsqueeze(2) * probs.view(batch, topk, topk)
        scores, chosen = expanded.flatten(1).topk(topk)
        score_list.append(expanded)
        token_list.append(index.view(batch, topk * topk))
        parents_list.append(chosen + topk * topk * (step - 1) + topk)
    return score_list, token_list, parents_list


def random_round(shape: Shape, device: torch.device | str, seed: int = 0) -> Round:
    """A round in which table and draft often agree: both speak a few hundred tokens of the vocabulary."""
    gen = torch.Generator(device).manual_seed(seed)
    spoken = min(shape.vocab, 200)

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=gen, device=device)

    plan = paper_stage_plan(shape.slots, shape.steps, shape.max_depth, min_envelope=ENVELOPE)
    chain = GraftChain.create(plan, shape.topk, shape.steps, device)
    table = SuccessorTable.create(shape.vocab, TABLE_K, 1, shape.context_rows, device=device)
    table.tokens[: table.empty_row].copy_(integers(-1, spoken, table.empty_row, TABLE_K))
    table.probs[: table.empty_row].copy_(torch.rand(table.empty_row, TABLE_K, generator=gen, device=device))
    table.tokens[table.discard_row] = 1
    lists = random_draft(seed, shape.batch, shape.topk, shape.steps, spoken, device)
    nodes = shape.batch * shape.slots
    logits = torch.randn(nodes, shape.vocab, generator=gen, device=device, dtype=torch.bfloat16)
    return Round(
        shape=shape,
        chain=chain,
        lists=lists,
        pool=draft_pool(*lists),
        table=table,
        root_tokens=integers(0, spoken, shape.batch),
        contexts=next_contexts(table, *integers(-1, spoken, 2, shape.batch)),
        table_index=integers(0, 1, shape.batch),
        seq_lens=integers(1, MAX_SEQ_LEN, shape.batch),
        thresholds=torch.full((len(plan.checkpoints),), 0.3, device=device),
        maps=ValueMaps.identity(chain.max_path - 1, device),
        targets=integers(0, spoken, shape.batch, shape.slots),
        accepted=integers(0, 2, shape.batch, shape.slots) > 0,
        logits=logits,
    )


def op_cases(case: Round) -> dict[str, Op]:
    """Every op that has a kernel, over inputs computed once and shared by both implementations.

    Weights of the value rule are compared as the floats they stand for; in-place updates return a fresh
    table.
    """
    chain, pool, layout = case.chain, case.pool, case.chain.layout
    retrieved = chain.retrieve(case.table, case.table_index, case.root_tokens, case.contexts)
    confidence = path_confidence(pool.scores, chain.topk, chain.steps)
    checkpoints = chain.stages.plan.checkpoints
    stage = staged_gate(confidence, checkpoints, case.thresholds)
    maps = curved_maps(len(layout.draft_levels), pool.scores.device)
    staged = staged_weights(chain.stages, layout, stage, pool.tokens, pool.scores, retrieved.tokens)
    candidates = (pool.tokens, pool.parents, staged[0], retrieved.tokens, staged[1])
    trie = merge_trie(layout, *candidates)
    tree = select_tree(layout, trie, case.root_tokens, case.shape.slots)

    cases: dict[str, Op] = {
        "path_confidence": lambda: (path_confidence(pool.scores, chain.topk, chain.steps),),
        "staged_gate": lambda: (staged_gate(confidence, checkpoints, case.thresholds),),
        "retrieve": lambda: chain.retrieve(case.table, case.table_index, case.root_tokens, case.contexts),
        "value_weights": lambda: _values(case, maps, retrieved),
        "staged_weights": lambda: staged_weights(
            chain.stages, layout, stage, pool.tokens, pool.scores, retrieved.tokens
        ),
        "merge_trie": lambda: merge_trie(layout, *candidates),
        "select_tree": lambda: select_tree(layout, trie, case.root_tokens, case.shape.slots),
        "walk_accepted": lambda: walk_accepted(tree.tokens, tree.parents, case.targets, chain.max_path),
        "top_successors": lambda: top_successors(case.logits, TABLE_K, case.shape.vocab),
        "update_from_logits": lambda: _updated_table(case, tree),
    }
    for mode in TreeMaskMode:
        if mode != TreeMaskMode.QLEN_ONLY_BITPACKING or case.shape.slots <= MAX_BITPACKED_SLOTS:
            cases[f"tree_links {mode.name}"] = _links_case(case, tree, mode)
    return cases


def curved_maps(depths: int, device: torch.device | str) -> ValueMaps:
    """Maps with bends, as a calibration would give them."""
    x = torch.tensor([0.0, 0.1, 0.4, 1.0], device=device).expand(2, depths, 4).contiguous()
    return ValueMaps(x, x.sqrt() * 0.9)


def _values(case: Round, maps: ValueMaps, retrieved: Retrieved) -> tuple[Tensor, ...]:
    layout, pool = case.chain.layout, case.pool
    draft = value_weights(maps, DRAFT, layout.pool_depths, pool.scores, pool.tokens)
    table = value_weights(maps, TABLE, layout.retrieved_depths, retrieved.probs, retrieved.tokens)
    return draft < 0, weights_to_floats(draft), table < 0, weights_to_floats(table)


def _updated_table(case: Round, tree: GraftedTree) -> tuple[Tensor, ...]:
    table = case.copy_of_table()
    update_from_logits(
        table,
        case.table_index,
        tree.tokens,
        tree.parents,
        tree.depths,
        case.contexts,
        case.accepted,
        case.logits,
    )
    return readable(table)


def readable(table: SuccessorTable) -> tuple[Tensor, ...]:
    """The parts of a table that anyone reads: all but the discarded writes."""
    return table.tokens[: table.discard_row], table.probs[: table.discard_row], table.tags[:-1]


def _links_case(case: Round, tree: GraftedTree, mode: TreeMaskMode) -> Op:
    def run() -> tuple[Tensor, ...]:
        if mode != TreeMaskMode.FULL_MASK:
            return tree_links(tree.parents, case.seq_lens, mode)
        cells = case.shape.batch * case.shape.slots * (MAX_SEQ_LEN + case.shape.slots)
        buffer = torch.empty(cells, dtype=torch.bool, device=tree.parents.device)
        return tree_links(tree.parents, case.seq_lens, mode, buffer)

    return run
