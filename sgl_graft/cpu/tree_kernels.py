"""The operations of ``cuda_graph/`` on draft trees and on the successor table, as single calls on a CPU.

Each stands for the torch reference whose name it has and gives the same result, bit for bit. Under a tree of
16 slots the arithmetic is nothing; what these calls save is the references' several dozen small tensor
operations per round.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..cuda_graph import coupled, tree_links
from ..cuda_graph.coupled import AcceptedPath
from ..cuda_graph.dispatch import register_host_op
from ..cuda_graph.merge import MergedTrie, TrieLayout
from ..cuda_graph.retrieve import DeviceTemplate, Retrieved
from ..cuda_graph.select import GraftedTree
from ..cuda_graph.successor_table import SuccessorTable
from ..cuda_graph.top_successors import TopSuccessors
from ..cuda_graph.tree_links import TreeLinks, TreeMaskMode
from ..cuda_graph.value_rule import ValueMaps
from . import block_draft, kernels, row_kernels
from .library import INT, POINTER, function


class _Table(ctypes.Structure):
    """``Table`` in ``native/table.cpp``."""

    _fields_ = (
        ("tokens", POINTER),
        ("probs", POINTER),
        ("tags", POINTER),
        *((name, INT) for name in ("rows", "k", "vocab_size", "num_tables", "context_rows", "context_mask")),
    )


def register() -> None:
    """Make these the CPU's implementations of the operations, where there is a kernel library."""
    if kernels.available(torch.float32):
        for op in (
            *(value_weights, merge_trie, select_tree, links_of_tree, parents_from_links, walk_accepted),
            *(retrieve, write_successors, row_kernels.top_successors, block_draft.best_tree),
        ):
            register_host_op(_REFERENCES.get(op.__name__, f"{op.__name__}_torch"), op)


_REFERENCES = {"links_of_tree": "tree_links_torch"}  # where the reference has another name


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def value_weights(maps: ValueMaps, source: int, depths: Tensor, path_probs: Tensor, tokens: Tensor) -> Tensor:
    """``value_rule.value_weights_torch``."""
    x, y = maps.x[source], maps.y[source]
    probs, tokens = path_probs.float().contiguous(), tokens.contiguous()
    out = torch.empty_like(tokens)
    function("graft_value_weights", "ppiipppiip")(
        x.data_ptr(),
        y.data_ptr(),
        *x.shape,
        depths.data_ptr(),
        probs.data_ptr(),
        tokens.data_ptr(),
        *tokens.shape,
        out.data_ptr(),
    )
    return out


def merge_trie(
    layout: TrieLayout,
    draft_tokens: Tensor,
    draft_parents: Tensor,
    draft_weights: Tensor,
    retrieved_tokens: Tensor,
    retrieved_weights: Tensor,
) -> MergedTrie:
    """``merge.merge_trie_torch``."""
    given = (draft_tokens, draft_parents, draft_weights, retrieved_tokens, retrieved_weights)
    inputs = [tensor.contiguous() for tensor in given]
    batch, pool = draft_tokens.shape
    trie = MergedTrie(*(_empty(batch, layout.num_nodes) for _ in range(4)))
    function("graft_merge_trie", "pipppiiipppppppp" + "p")(
        layout.level_bounds.data_ptr(),
        layout.level_bounds.shape[0],
        layout.order.data_ptr(),
        layout.pool_shift.data_ptr(),
        layout.fathers.data_ptr(),
        pool,
        retrieved_tokens.shape[1],
        batch,
        *(tensor.data_ptr() for tensor in inputs),
        *(tensor.data_ptr() for tensor in trie),
    )
    return trie


def select_tree(layout: TrieLayout, trie: MergedTrie, root_tokens: Tensor, slots: int) -> GraftedTree:
    """``select.select_tree_torch``."""
    inputs = [tensor.contiguous() for tensor in (trie.tokens, trie.parents, trie.weights, trie.sources)]
    roots = root_tokens.contiguous()
    batch, nodes = trie.tokens.shape
    tree = GraftedTree(*(_empty(batch, slots) for _ in range(5)))
    function("graft_select_tree", "pppppiipi" + "ppppp")(
        *(tensor.data_ptr() for tensor in inputs),
        layout.depths.data_ptr(),
        batch,
        nodes,
        roots.data_ptr(),
        slots,
        *(tensor.data_ptr() for tensor in tree),
    )
    return tree


def links_of_tree(
    parents: Tensor, seq_lens: Tensor, mask_mode: TreeMaskMode, mask_out: Tensor | None
) -> TreeLinks:
    """``tree_links.tree_links_torch``; only the CPU attention's mask mode has a kernel."""
    if mask_mode != TreeMaskMode.QLEN_ONLY:
        return tree_links.tree_links_torch(parents, seq_lens, mask_mode, mask_out)
    parents, seq_lens = parents.contiguous(), seq_lens.contiguous()
    batch, slots = parents.shape
    mask = torch.empty(batch * slots * slots, dtype=torch.bool)
    links = TreeLinks(mask, _empty(batch * slots), *(_empty(batch, slots) for _ in range(3)))
    function("graft_tree_links", "ppii" + "ppppp")(
        parents.data_ptr(), seq_lens.data_ptr(), batch, slots, *(tensor.data_ptr() for tensor in links)
    )
    if mask_out is None:
        return links
    mask_out[: mask.numel()].copy_(mask)
    return links._replace(tree_mask=mask_out)


def parents_from_links(retrieve_next_token: Tensor, retrieve_next_sibling: Tensor) -> Tensor:
    """``coupled.parents_from_links_torch``."""
    first, sibling = retrieve_next_token.contiguous(), retrieve_next_sibling.contiguous()
    if first.dtype != torch.int64 or sibling.dtype != torch.int64:
        return coupled.parents_from_links_torch(first, sibling)
    parents = torch.empty_like(first)
    function("graft_parents_from_links", "ppiip")(
        first.data_ptr(), sibling.data_ptr(), *first.shape, parents.data_ptr()
    )
    return parents


def walk_accepted(tokens: Tensor, parents: Tensor, target_tokens: Tensor, max_path: int) -> AcceptedPath:
    """``coupled.walk_accepted_torch``."""
    inputs = [tensor.long().contiguous() for tensor in (tokens, parents, target_tokens)]
    batch, slots = tokens.shape
    path = AcceptedPath(
        torch.empty(batch * slots, dtype=torch.int32),
        torch.empty((batch, max_path), dtype=torch.int32),
        torch.empty(batch, dtype=torch.int32),
        _empty(batch),
    )
    function("graft_walk_accepted", "pppiii" + "pppp")(
        *(tensor.data_ptr() for tensor in inputs),
        batch,
        slots,
        max_path,
        *(tensor.data_ptr() for tensor in path),
    )
    return path


def _table(table: SuccessorTable) -> _Table:
    return _Table(
        table.tokens.data_ptr(),
        table.probs.data_ptr(),
        table.tags.data_ptr(),
        table.tokens.shape[0],
        table.k,
        table.vocab_size,
        table.num_tables,
        table.context_rows,
        table.context_mask,
    )


def retrieve(
    table: SuccessorTable,
    template: DeviceTemplate,
    table_index: Tensor,
    root_tokens: Tensor,
    contexts: Tensor,
) -> Retrieved:
    """``retrieve.retrieve_torch``."""
    inputs = [tensor.contiguous() for tensor in (table_index, root_tokens, contexts)]
    batch, nodes = root_tokens.shape[0], template.fathers.shape[0]
    found = Retrieved(_empty(batch, nodes), torch.empty((batch, nodes), dtype=torch.float32))
    function("graft_retrieve", "pppii" + "ppp" + "pp")(
        ctypes.byref(_table(table)),
        template.fathers.data_ptr(),
        template.ranks.data_ptr(),
        nodes,
        batch,
        *(tensor.data_ptr() for tensor in inputs),
        *(tensor.data_ptr() for tensor in found),
    )
    return found


def write_successors(
    table: SuccessorTable,
    table_index: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    contexts: Tensor,
    accepted: Tensor,
    best: TopSuccessors,
) -> None:
    """``table_update.write_successors_torch``, without the writes that nobody reads."""
    given = (table_index, tokens.long(), parents, depths, contexts, accepted, best.ids, best.probs)
    inputs = [tensor.contiguous() for tensor in given]
    function("graft_write_successors", "pii" + "pppppppp")(
        ctypes.byref(_table(table)), *tokens.shape, *(tensor.data_ptr() for tensor in inputs)
    )
