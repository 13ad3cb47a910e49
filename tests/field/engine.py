"""A whole scheduler in this process, driven step by step, with a list of everything it sends to clients."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.scheduler import make_request, make_scheduler, step

from .interleavings import KINDS, Extras, Job, Model, Scenario

MOST_RUNNING = 8
MAX_STEPS = 4000
THINK_END = [ord("e"), ord(" ")]  # what ends a thought of the tiny target, which never writes "</think>"


class Engine:
    """One scheduler on a tiny target.

    Args:
        target: folder of the model.
        argv: further server flags.
        think: whether requests may think before they are constrained.
    """

    def __init__(self, target: Path, *argv: str, think: bool = True) -> None:
        if think:
            from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector

            BaseReasoningFormatDetector.get_think_end_token_ids = lambda *_, **__: THINK_END
            argv = (*argv, "--reasoning-parser", "qwen3")
        self.scheduler = make_scheduler(target, *argv)
        self.sent: list[tuple[str, list[int], dict[str, Any] | None, Extras]] = []
        self._logprobs: dict[str, list[Any]] = {}
        self.verifies: dict[str, int] = {}  # of requests that are over
        self.cached: dict[str, int] = {}  # tokens that were not prefilled, of requests that are over
        channels = self.scheduler.ipc_channels
        for channel in (channels.send_to_detokenizer, channels.send_to_tokenizer):
            channel.send_output = self._record

    @property
    def worker(self) -> Any:
        return self.scheduler.draft_worker

    def _record(self, output: Any, *_: Any) -> None:
        rids = getattr(output, "rids", None)
        if rids is None:
            if type(output).__name__ == "AbortReq":  # a request that never ran
                self.sent.append((output.rid, [], {"type": "abort"}, {"logprobs": [], "reasoning": 0}))
            return
        for i, rid in enumerate(rids):
            known = self._logprobs.setdefault(rid, [])
            if getattr(output, "output_token_logprobs_val", None):
                values, tokens = output.output_token_logprobs_val[i], output.output_token_logprobs_idx[i]
                known += [[float(v), int(t)] for v, t in zip(values or [], tokens or [], strict=True)]
            finish = output.finished_reasons[i]
            if finish:
                self.cached[rid] = output.cached_tokens[i]
                if getattr(output, "spec_verify_ct", None):
                    self.verifies[rid] = output.spec_verify_ct[i]
            more: Extras = {"logprobs": known, "reasoning": output.reasoning_tokens[i]}
            self.sent.append((rid, list(output.output_ids[i]), finish, more))

    def request(self, job: Job) -> Any:
        params = dict(KINDS[job.kind]) | {"max_new_tokens": job.tokens, "sampling_seed": job.seed}
        logprobs, think = params.pop("logprobs", False), params.pop("think", False)
        return make_request(
            self.scheduler,
            job.rid,
            job.prompt,
            params,
            input_text=job.prompt.decode("latin-1"),
            return_logprob=logprobs,
            logprob_start_len=-1,
            stream=True,
            require_reasoning=think,
        )

    def submit(self, jobs: list[Job]) -> None:
        self.scheduler.process_input_requests([self.request(job) for job in jobs])

    def abort(self, rid: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.process_input_requests([AbortReq(rid=rid)])

    def step(self, *, may_idle: bool = True) -> list[str]:
        """One turn of the scheduler's own loop; the ids of the requests in its batch."""
        scheduler = self.scheduler
        rids = [req.rid for req in step(scheduler)]
        if (
            not rids
            and may_idle
            and not scheduler.grammar_manager.grammar_queue
            and not scheduler.waiting_queue
        ):
            scheduler.on_idle()  # the engine's own search for leaks; it raises
        return rids

    def state_of(self, rid: str) -> str:
        """Where a request is that is not over; one of ``interleavings.STATES``."""
        scheduler = self.scheduler
        if any(req.rid == rid for req in scheduler.grammar_manager.grammar_queue):
            return "grammar"
        for req in scheduler.waiting_queue:
            if req.rid == rid:
                return "retracted" if req.retraction_count else "queued"
        if scheduler.chunked_req is not None and scheduler.chunked_req.rid == rid:
            return "prefill"
        return "decoding"

    def take(self, model: Model) -> None:
        """Hand everything that was sent to the model."""
        for chunk in self.sent:
            model.received(*chunk)
        self.sent.clear()

    def run(self, scenario: Scenario, model: Model, aborted_in: dict[str, int]) -> None:
        """Run a scenario to its end, then find nothing left behind.

        Raises:
            AssertionError: it does not end, or the engine finds a leak.
        """
        rng = random.Random(scenario.seed)
        waiting = sorted(scenario.jobs, key=lambda job: job.at)
        retractions: dict[str, int] = {}
        for now in range(MAX_STEPS):
            if model.idle and waiting:
                now = max(now, waiting[0].at)  # nothing happens before the next wave
            arrived = [job for job in waiting if job.at <= now]
            waiting = [job for job in waiting if job.at > now]
            if model.idle and not arrived and not waiting:
                break
            if arrived:
                for job in arrived:
                    model.submit(job)
                self.submit(arrived)
            # A state that no abort has met yet is worth one; otherwise they come by chance.
            fresh = [rid for rid in model.open if not aborted_in.get(self.state_of(rid))]
            victims = fresh if rng.random() < 0.5 else model.open
            if victims and (victims is fresh or rng.random() < scenario.abort_chance):
                rid = rng.choice(victims)
                state = self.state_of(rid)
                aborted_in[state] = aborted_in.get(state, 0) + 1
                model.abort(rid)
                self.abort(rid)
                self.take(model)
            if rng.random() < 0.02:
                model.flushed(self.scheduler.flush_cache())
            model.ran(self.step())
            for req in self.scheduler.waiting_queue:
                retractions[req.rid] = req.retraction_count
            self.take(model)
            self.scheduler.invariant_checker.self_check_during_busy()
        else:
            raise AssertionError(f"scenario {scenario.seed} did not end: {model.open} are open")
        aborted_in["retractions"] = aborted_in.get("retractions", 0) + sum(retractions.values())
        self.settle()

    def settle(self) -> None:
        """Let the scheduler drop its finished requests, and find all slots free or cached."""
        for _ in range(3):
            assert self.step() == []

    def answer(self, jobs: list[Job]) -> dict[str, dict[str, Any]]:
        """Tokens, ends and verifies of requests that run together, by request id."""
        found: dict[str, dict[str, Any]] = {
            job.rid: {"tokens": [], "finish": None, "verifies": 0} for job in jobs
        }
        self.submit(jobs)
        while any(answer["finish"] is None for answer in found.values()):
            self.step()
            for rid, tokens, finish, _ in self.sent:
                found[rid]["tokens"] += tokens
                found[rid]["finish"] = finish
            self.sent.clear()
        for rid, answer in found.items():
            answer["verifies"] = self.verifies.pop(rid, 0)
        return found
