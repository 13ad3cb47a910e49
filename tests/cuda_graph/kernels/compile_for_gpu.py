"""Compile every kernel of the package to machine code for an H100/H200, on a machine without any GPU.

Run as a script: launches are replaced by compilation, so the wrappers choose the real argument types and
block sizes. Prints the names of the kernels compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))

from sgl_graft.cuda_graph.chain import GraftChain
from sgl_graft.cuda_graph.check_cases import random_draft
from sgl_graft.cuda_graph.coupled import walk_accepted
from sgl_graft.cuda_graph.dispatch import forced_backend
from sgl_graft.cuda_graph.eagle_tree import draft_pool
from sgl_graft.cuda_graph.race import race_tokens
from sgl_graft.cuda_graph.stages import paper_stage_plan
from sgl_graft.cuda_graph.successor_table import SuccessorTable
from sgl_graft.cuda_graph.table_update import update_from_logits
from sgl_graft.cuda_graph.tree_links import TreeMaskMode, tree_links
from sgl_graft.cuda_graph.value_rule import ValueMaps

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.uint32: "*u32",
}
compiled: set[str] = set()


def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands in for `JITFunction.run`; an integer equal to 1 becomes a constant, as at a real launch."""
    names = [param.name for param in kernel.params]
    values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    signature, constants = {}, {}
    for position, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or (isinstance(value, int) and value == 1):
            signature[param.name], constants[(position,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
    options = {name: value for name, value in kwargs.items() if name not in names}
    triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options)
    compiled.add(kernel.__name__)


def run_every_op(batch: int = 2, slots: int = 16, vocab: int = 151_936) -> None:
    chain = GraftChain.create(paper_stage_plan(slots, 5, 8, min_envelope=48), topk=4, steps=5)
    pool = draft_pool(*random_draft(0, batch, 4, 5))
    table = SuccessorTable.create(vocab, k=8, num_tables=1, context_rows=1024)
    zeros = torch.zeros(batch, dtype=torch.long)
    retrieved = chain.retrieve(table, zeros, zeros, zeros)
    stage = chain.stage(pool.scores, torch.zeros(len(chain.stages.plan.checkpoints)))
    chain.graft_staged(pool, retrieved, zeros, stage)
    tree = chain.graft_value(pool, retrieved, zeros, ValueMaps.identity(8))
    mask = torch.zeros(batch * slots * slots, dtype=torch.bool)
    for mode in TreeMaskMode:
        tree_links(tree.parents, zeros, mode, mask if mode == TreeMaskMode.FULL_MASK else None)
    rows = torch.zeros(batch * slots, dtype=torch.long)
    race_tokens(torch.zeros(batch * slots, vocab), rows, rows, rows.float())
    walk_accepted(tree.tokens, tree.parents, tree.tokens, chain.max_path)
    accepted = tree.tokens > 0
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(batch * slots, vocab, dtype=dtype)
        update_from_logits(table, zeros, tree.tokens, tree.parents, tree.depths, zeros, accepted, logits)


if __name__ == "__main__":
    JITFunction.run = compile_instead
    with forced_backend("triton"):
        run_every_op()
    print(*sorted(compiled))
