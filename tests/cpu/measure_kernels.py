"""Speed of the CPU kernels beside torch's: ``OMP_NUM_THREADS=2 python -m tests.cpu.measure_kernels``."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from sgl_graft.cpu import attention_native, kernels, narrow
from sgl_graft.cpu.attention_plan import uniform_plan

SHAPES = ((3072, 576), (576, 1536), (49152, 576))  # rows and columns of the embedded model's weights
ROWS = (1, 2, 4, 8, 16, 64, 512)
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # the products of one of its 30 layers
HEAD = (49152, 576)
MODEL_ROWS = (1, 4, 8, 16, 64)
BATCHES = (
    (8, 1, 500),
    (8, 8, 500),
    (1, 8, 2000),
    (1, 512, 512),
)  # requests, queries of each, keys before them
HEADS, KV_HEADS, DIM = 9, 3, 64


def fastest(run: Callable[[], object], times: int = 8) -> float:
    """Seconds of the fastest of several runs."""
    run()
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def products() -> None:
    for n, k in SHAPES:
        weight = torch.randn(n, k)
        for rows in ROWS:
            x = torch.randn(rows, k)
            ours = fastest(lambda x=x, weight=weight: kernels.linear(x, weight))
            theirs = fastest(lambda x=x, weight=weight: functional.linear(x, weight))
            flops = 2e-9 * rows * n * k
            print(
                f"[{rows}, {k}] x [{k}, {n}]: {flops / ours:.0f} GFLOP/s, torch {flops / theirs:.0f}",
                flush=True,
            )


def whole_model() -> None:
    """All products of the embedded model in turn, so that every weight comes from memory."""
    weights = [torch.randn(shape).bfloat16().float() for shape in (*LAYER * 30, HEAD)]
    copies = [weight.bfloat16() for weight in weights]
    inputs = {width: torch.randn(max(MODEL_ROWS), width) for width in {weight.shape[1] for weight in weights}}

    def wide(rows: int) -> None:
        for weight in weights:
            kernels.linear(inputs[weight.shape[1]][:rows], weight)

    def narrowed(rows: int) -> None:
        for weight, copy in zip(weights, copies, strict=True):
            narrow.linear(inputs[weight.shape[1]][:rows], weight, copy)

    for name, run in {"fp32": wide, "bf16 copies": narrowed}.items():
        times = {rows: 1e3 * fastest(lambda rows=rows, run=run: run(rows), 5) for rows in MODEL_ROWS}
        print(f"whole model, {name}, ms:", {rows: round(ms, 1) for rows, ms in times.items()}, flush=True)


def attentions() -> None:
    for batch, queries, prefix in BATCHES:
        length = prefix + queries
        keys, values = torch.randn(2, batch * length, KV_HEADS, DIM)
        table = torch.arange(batch * length, dtype=torch.int32).view(batch, -1)
        plan = uniform_plan(table, torch.arange(batch), torch.full((batch,), prefix), queries)
        q = torch.randn(batch * queries, HEADS * DIM)
        seconds = fastest(
            lambda q=q, keys=keys, values=values, plan=plan: attention_native.attend(
                q, keys, values, HEADS, DIM**-0.5, True, plan
            )
        )
        print(f"{batch} requests, {queries} queries over {prefix} keys: {1e3 * seconds:.2f} ms", flush=True)


if __name__ == "__main__":
    products()
    whole_model()
    attentions()
