"""A whole scheduler in this process, so that a test can look inside SPECBLOCK's rounds.

Run as a script, ``python -m tests.specblock.probe (OUT.json none|CONFIG)...``: SGLang's state is global to a
process, so it is imported once and each pair runs in a fork. A fork serves a tiny target to batches of
requests, with a pool so tight that some are retracted, and writes what it saw; the tests judge it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tests.scheduler import make_request, make_scheduler, serve, tokens_of

SLOTS = 12
TEXT = "\n".join(topics[name] for name in sorted(topics)).encode()
PROMPTS = [TEXT[9000 * i : 9000 * i + 25 + 17 * i] for i in range(8)]
LONGEST = TEXT[80000:80800]  # fills most of the pool of tokens alone
SAMPLED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
PENALTIES = {"temperature": 0.0, "frequency_penalty": 0.4, "repetition_penalty": 1.1}

# name -> lengths of the answers, how many run at once, sampling parameters
LOADS: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "alone": ([24, 24], 1, {"temperature": 0.0}),
    "mixed finish": ([16, 40, 30, 9, 34, 25, 40, 12], 8, {"temperature": 0.0}),
    "cached": ([16, 40, 30, 9, 34, 25, 40, 12], 4, {"temperature": 0.0}),
    "sampled": ([32] * 8, 8, {"temperature": 1.0}),
    "filtered": ([32] * 8, 3, SAMPLED),
    "grouped": ([24] * 6, 6, {"temperature": 0.0, "custom_params": {"graft": {"group": "short"}}}),
    "penalties": ([16] * 3, 3, PENALTIES),
    "longest": ([60], 1, {"temperature": 0.0}),
    "tight": ([170] * 8, 8, {"temperature": 0.0}),
}
TIGHT = ("--max-total-tokens", "1024", "--chunked-prefill-size", "48", "--schedule-conservativeness", "0.05")


def request(scheduler: Any, rid: str, prompt: bytes, length: int, params: dict[str, Any]) -> Any:
    text = prompt.decode("latin-1")
    return make_request(scheduler, rid, prompt, {"max_new_tokens": length, **params}, input_text=text)


def answers(scheduler: Any, requests: list[Any], at_once: int) -> dict[str, dict[str, Any]]:
    """Run the requests to their end; what each answered and met by request id."""
    return {
        rid: {
            "tokens": tokens_of(req),
            "verifies": getattr(req, "spec_verify_ct", 0),
            "cached": req.cached_tokens,
            "retracted": int(req.retraction_count),
        }
        for rid, req in serve(scheduler, requests, at_once).items()
    }


class Watch:
    """Compares what block 1 left after every commit with one full forward over all of the request's pairs."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.commit, worker._commit = worker._commit, self
        self.pairs: dict[int, Any] = {}  # pool slot -> (features, token) of the row that is stored there
        self.largest, self.compared, self.restored = 0.0, 0, 0

    def __call__(self, rows: Any, features: Any, tokens: Any, lengths: list[int], counts: list[int]) -> Any:
        import torch

        from sgl_graft.specblock.pool_attention import CommitRows, DraftPool

        embeds = self.commit(rows, features, tokens, lengths, counts)
        table = self.worker.req_to_token_pool.req_to_token
        contexts = [table[row, :length].long() for row, length in zip(rows.tolist(), lengths, strict=True)]
        written = torch.cat([c[-count:] for c, count in zip(contexts, counts, strict=True)])
        for slot, feature, token in zip(written.tolist(), features, tokens, strict=True):
            self.pairs[slot] = (feature.clone(), token.clone())
        drafter = self.worker.drafter
        draft = drafter.draft
        for row, context, count in zip(rows.tolist(), contexts, counts, strict=True):
            length = len(context)
            self.restored += length - count
            stored = [self.pairs[slot] for slot in context.tolist()]
            shape = (length, draft.block, *self.worker.pool.keys[0].shape[2:])
            fresh = DraftPool(
                [torch.zeros(shape) for _ in draft.layers], [torch.zeros(shape) for _ in draft.layers]
            )
            places = torch.arange(length)
            attend = CommitRows(fresh, places, [places], places, [length], places[-1:], [1])
            inputs = draft.first_inputs(
                torch.stack([f for f, _ in stored]), drafter.embed(torch.stack([t for _, t in stored]).long())
            )
            hidden = draft.run(inputs, places, attend, places[-1:])[0]
            want = draft.lm_head(draft.norm(hidden))
            got = draft.lm_head(draft.norm(self.worker.waiting.hidden[row]))
            self.largest = max(self.largest, float((want - got).abs().max() / want.abs().max()))
            self.compared += 1
        return embeds


class Scrambler:
    """Stands for a learner: answers at once, each time with other weights, which it praises."""

    alive = True

    def __init__(self, draft: Any) -> None:
        import torch

        from sgl_graft.specblock.adaptation.weights import WeightArea

        self.area = WeightArea.private(draft)
        self._shipped = self.area.flat.clone()
        self._random = torch.Generator().manual_seed(3)
        self._updates = 0
        self._arm: str | None = None

    def send(self, header: dict[str, Any], tensors: Any = None) -> bool:
        if header["job"] == "update":
            import torch

            self._arm, self._updates = header["arm"], self._updates + 1
            self.area.flat.copy_(self._shipped)
            if self._updates % 3 == 0:  # a broken draft, which the guard must notice
                head = self.area.views["lm_head.weight"]
                head.copy_(head[torch.randperm(len(head), generator=self._random)])
            else:
                noise = torch.randn(self.area.flat.shape, generator=self._random)
                self.area.flat.add_((noise * 0.002).bfloat16())
        return True

    def answer(self) -> Any:
        from sgl_graft.specblock.adaptation.learner import Update

        arm, self._arm = self._arm, None
        return None if arm is None else (Update(arm, 2.0, 2.5, 0.01, 1), None)

    def close(self) -> None:
        pass


def main(output: Path, config: str) -> None:
    import torch

    from tests.serving import markov

    from .markov_draft import build_draft

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        target = markov.build_target(Path(scratch) / "target")
        if config == "none":
            argv: tuple[str, ...] = ("--max-total-tokens", "8192")
        else:
            draft = build_draft(Path(scratch) / "draft")
            argv = (
                *("--speculative-algorithm", "SPECBLOCK", "--speculative-draft-model-path", str(draft)),
                *("--speculative-num-draft-tokens", str(SLOTS), "--graft-config", config, *TIGHT),
            )
        scheduler = make_scheduler(target, *argv)
        found: dict[str, Any] = {}
        worker = scheduler.draft_worker
        adaptation = getattr(worker, "adaptation", None)
        # Entries of rows that older weights committed are not those of the newest.
        watch = Watch(worker.draft_worker) if config != "none" and adaptation is None else None
        if adaptation is not None:
            scrambler = Scrambler(worker.draft_worker.model.draft)
            adaptation.director._start_learner = lambda: scrambler
        with torch.inference_mode():
            for name, (lengths, at_once, params) in LOADS.items():
                if name == "sampled" and watch is not None:
                    # Watching costs a full forward per round; the rest runs as it is served.
                    watch.worker._commit = watch.commit
                requests = [
                    request(
                        scheduler,
                        f"{name}-{i}",
                        LONGEST if name == "longest" else PROMPTS[i],
                        length,
                        {**params, "sampling_seed": 11 + i},
                    )
                    for i, length in enumerate(lengths)
                ]
                found[name] = answers(scheduler, requests, at_once)
        if watch is not None:
            runner = scheduler.draft_worker.draft_worker.draft_runner
            found["watch"] = {
                "largest": watch.largest,
                "compared": watch.compared,
                "restored": watch.restored,
                "entries": list(runner.token_to_kv_pool.get_key_buffer(0).shape),
                "budget": scheduler.tp_worker.model_runner.spec_aux_config.eagle_draft_num_layers,
            }
        if adaptation is not None:
            found["adaptation"] = adaptation.status()
        output.write_text(json.dumps(found))
    os._exit(0)


def fork_each(pairs: list[tuple[str, str]]) -> None:
    """Run the pairs one after the other; one that fails leaves no file."""
    import sglang.srt.managers.scheduler
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401
    import transformers  # noqa: F401

    for output, config in pairs:
        child = os.fork()
        if child == 0:
            try:
                main(Path(output), config)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.waitpid(child, 0)


if __name__ == "__main__":
    fork_each(list(zip(sys.argv[1::2], sys.argv[2::2], strict=True)))
