"""What random interleavings would rarely hit: the end of the context, a starved pool, a cached prefix."""

from __future__ import annotations

from typing import Any

from .engine import MAX_STEPS, Engine
from .interleavings import PREFIXES, TEXT, Job

CONTEXT = 448
LAST = range(1, 34, 2)  # free positions behind the prompt
WARM = 6


def edge_jobs() -> list[Job]:
    """Prompts that leave only so many positions of the context free, greedy and seeded."""
    return [
        Job(f"edge-{left}-{kind}", kind, TEXT[left : left + CONTEXT - left], 1000, left, 0)
        for left in LAST
        for kind in ("long", "long, seeded")
    ]


def look_at_edges(engine: Engine, answers: dict[str, Any]) -> dict[str, Any]:
    """Figures for the tests to judge, on an engine that is idle."""
    return {
        "edges": last_positions(engine, answers),
        "warm": cold_and_warm(engine),
        "starved": starved(engine),
        "updated": [name for name, _ in engine.worker.weight_update_runners()],
    }


def last_positions(engine: Engine, answers: dict[str, Any]) -> list[dict[str, Any]]:
    """By free positions: how many tokens plain decoding wrote, how many we did, and if they are those."""
    jobs = edge_jobs()
    found = engine.answer(jobs)
    engine.settle()
    rows = []
    for job in jobs:
        mine, plain = found[job.rid], answers[job.key]
        same = mine["tokens"] == plain["tokens"][: len(mine["tokens"])]
        rows.append(
            {
                "job": job.rid,
                "plain": len(plain["tokens"]),
                "ours": len(mine["tokens"]),
                "same": same,
                "finish": mine["finish"]["type"],
            }
        )
    return rows


def cold_and_warm(engine: Engine) -> list[dict[str, int]]:
    """Verifies of the same request alone: on empty caches, and on its own cached prefix."""
    rows = []
    for i in range(WARM):
        prompt = PREFIXES[i % len(PREFIXES)] + TEXT[30_000 + 90 * i : 30_060 + 90 * i]
        engine.settle()
        assert engine.scheduler.flush_cache()
        counts = []
        for turn in ("cold", "warm"):
            job = Job(f"{turn}-{i}", "long", prompt, 48, 0, 0)
            (answer,) = engine.answer([job]).values()
            counts.append(answer["verifies"])
            engine.settle()
        rows.append({"cold": counts[0], "warm": counts[1], "cached": engine.cached[f"warm-{i}"]})
    return rows


def draft_cache(engine: Engine) -> dict[str, float]:
    """The draft's keys after plain and whole rounds in turn, against those of a prefill of the same text.

    `difference` is the largest share by which a committed position's key differs; `control` the same when the
    draft never reads what was decoded without it.
    """
    import torch

    from sgl_graft.graft import capped
    from sgl_graft.serving.load_cap import Alternating

    worker, pool = engine.worker, engine.worker.draft_worker.draft_runner.token_to_kv_pool
    table = worker.req_to_token_pool.req_to_token
    slots = worker.state.shape.slots

    def keys(name: str, prompt: bytes, tokens: int) -> tuple[list[int], torch.Tensor]:
        """The whole text, and the draft's keys of the positions that are surely committed."""
        assert engine.scheduler.flush_cache()
        engine.submit([Job(name, "long", prompt, tokens, 0, 0)])
        written: list[int] = []
        finish, kept = None, torch.empty(0)
        while finish is None:
            engine.step()
            running = [*engine.scheduler.running_batch.reqs, *(engine.scheduler.last_batch or _NOBODY).reqs]
            for req in running:
                if req.rid == name and req.kv.req_pool_idx is not None and not req.finished():
                    length = len(prompt) + len(req.output_ids) - 1 - slots
                    places = table[req.kv.req_pool_idx, :length].long()
                    kept = pool.get_key_buffer(pool.start_layer)[places].clone()
            for _, new, ended, _ in engine.sent:
                written, finish = written + new, finish or ended
            engine.sent.clear()
        engine.settle()
        return [*prompt, *written], kept

    def largest(got: torch.Tensor, want: torch.Tensor) -> float:
        length = min(len(got), len(want))
        return float((got[:length] - want[:length]).abs().max() / want[:length].abs().max())

    cap, read = worker.cap, capped.catch_up
    worker.cap = Alternating(slots, period=7)
    text, mixed = keys("mixed", PREFIXES[2], 60)
    capped.catch_up = lambda batch, draft, waiting, rows: waiting.take(rows)
    _, skipped = keys("skipped", PREFIXES[2], 60)
    capped.catch_up = read
    worker.cap = cap
    _, fresh = keys("fresh", bytes(text), 20)
    return {"difference": largest(mixed, fresh), "control": largest(skipped, fresh), "rows": len(mixed)}


class _NOBODY:
    reqs: tuple[Any, ...] = ()


def starved(engine: Engine) -> dict[str, Any]:
    """A request that is alone and still does not fit: it ends with a reason, and the next one is served."""
    engine.settle()
    assert engine.scheduler.flush_cache()
    allocator = engine.scheduler.token_to_kv_pool_allocator
    engine.submit([Job("starved", "long", PREFIXES[0], 300, 0, 0)])
    for _ in range(3):
        engine.step()
    held = allocator.alloc((allocator.available_size() - 64) // 64 * 64)
    tokens: list[int] = []
    finish = None
    for _ in range(MAX_STEPS):
        if finish is not None:
            break
        engine.step(may_idle=False)  # the engine would call the held slots a leak
        for _, new, ended, _ in engine.sent:
            tokens += new
            finish = finish or ended
        engine.sent.clear()
    allocator.free(held)
    engine.settle()
    (after,) = engine.answer([Job("after", "long", PREFIXES[0], 20, 0, 0)]).values()
    engine.settle()
    return {"finish": finish, "tokens": tokens, "after": after["tokens"]}
