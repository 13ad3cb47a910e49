"""A whole scheduler in this process: made as the engine makes it, fed and stepped by hand.

SGLang's state is global to a process, so a process makes one scheduler.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Step = Callable[[Any, Any], None]


def make_scheduler(target: Path, *argv: str) -> Any:
    """A scheduler of ``target`` on the CPU; ``argv`` as on a command line, the last of a flag counts."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, prepare_server_args

    words = [
        *("--model-path", str(target), "--device", "cpu", "--dtype", "float32", "--random-seed", "1"),
        *("--max-running-requests", "8", "--log-level", "warning"),
        *argv,
    ]
    sys.argv = ["launch_server", *words]
    load_plugins()
    args = prepare_server_args(words)
    args.resolve_once()
    args.check_server_args()
    from sglang.srt.managers import scheduler as module

    ports = PortArgs.init_new(args)
    world = module.spawn_world_rank(args, tp_rank=0, pp_rank=0)
    module.publish(args, role="scheduler", ranks=module.SpawnRanks(world_rank=world, dp_rank=None, gpu_id=0))
    load_plugins()
    return module.Scheduler(args, ports)


def make_request(
    scheduler: Any,
    rid: str,
    prompt: Iterable[int],  # token ids; of a tiny target its bytes
    params: dict[str, Any],
    **others: Any,
) -> Any:
    """A request as the tokenizer process sends it; ``others`` are fields of that message."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(**params)
    sampling.normalize(scheduler.tokenizer)
    fields: dict[str, Any] = {
        "input_text": "",
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=array("q", list(prompt)), sampling_params=sampling, **fields | others
    )


def step(scheduler: Any, each_step: Step | None = None) -> list[Any]:
    """One turn of the scheduler's own loop; the engine's requests that it ran, none where it was idle."""
    plan = scheduler.get_next_batch_to_run(
        running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
    )
    scheduler.running_batch = plan.running_batch
    batch = plan.batch_to_run
    ran = list(batch.reqs) if batch else []
    if batch:
        result = scheduler.run_batch(batch)
        scheduler.process_batch_result(batch, result)
        if each_step is not None:
            each_step(batch, result)
    scheduler.last_batch = batch
    return ran


def serve(
    scheduler: Any, requests: list[Any], at_once: int | None = None, each_step: Step | None = None
) -> dict[str, Any]:
    """Run the requests to their end, ``at_once`` of them or all; the engine's own requests by id."""
    seen: dict[str, Any] = {}
    waiting = list(requests)
    while waiting or len(seen) < len(requests) or any(not req.finished() for req in seen.values()):
        running = len(requests) - len(waiting) - sum(req.finished() for req in seen.values())
        room = len(waiting) if at_once is None else max(0, at_once - running)
        admitted, waiting = waiting[:room], waiting[room:]
        if admitted:
            scheduler.process_input_requests(admitted)
        seen |= {req.rid: req for req in step(scheduler, each_step)}
    return seen


def tokens_of(req: Any) -> list[int]:
    """What a request answered: a round may have computed tokens beyond its length."""
    return list(req.output_ids)[: req.sampling_params.max_new_tokens]
