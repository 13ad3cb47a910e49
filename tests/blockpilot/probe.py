"""A whole scheduler in this process, so that a test can look inside BLOCKPILOT's rounds.

Run as a script, ``python -m tests.blockpilot.probe OUT.json``: SGLang's state is global to a process. It
serves a tiny target with a DFlash draft that reads its whole block, and writes what it saw; the tests judge
it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.scheduler import Step, make_request, make_scheduler, serve, tokens_of

B_MAX = 7
TRAINED = 5
TOKENS = 48
CANDIDATES = (3, 4, 5, 6, 7)
PROMPTS = (
    b"The import statement combines two operations; it searches",
    b"A",
    b"Numeric literals",
    b"def f(x):\n    return",
    b"The following sections describe the standard types that are built into the interpreter.",
    b"class",
)


def build(folder: Path) -> tuple[Path, Path]:
    """The target and a draft of the bigrams, disturbed so that every key of the block counts."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.serving import markov

    target = markov.build_target(folder / "target")
    draft = markov.build_dflash(folder / "draft")
    weights = load_file(draft / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    # The norms behind these projections would stretch stronger noise to full length.
    strength = {"q_proj": 1e-5, "k_proj": 1e-5, "fc": 1e-4}
    for name, tensor in weights.items():
        for part, gain in strength.items():
            if f"{part}.weight" in name:
                weights[name] = tensor + gain * torch.randn(tensor.shape, generator=generator)
    save_file(weights, draft / "model.safetensors")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"block_size": TRAINED}))
    return target, draft


def start(target: Path, draft: Path, config: dict[str, Any], *flags: str) -> Any:
    """A scheduler with the BLOCKPILOT worker; ``flags`` as on a command line."""
    return make_scheduler(
        target,
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-algorithm", "BLOCKPILOT", "--graft-config", json.dumps(config), *flags),
    )


def request(
    scheduler: Any, rid: str, prompt: Iterable[int], settings: dict | None, tokens: int, **params: Any
) -> Any:
    """``settings`` are what the request asks of sgl_graft."""
    custom = {"graft": settings} if settings else None
    return make_request(scheduler, rid, prompt, {"max_new_tokens": tokens, "custom_params": custom, **params})


def answers(scheduler: Any, requests: list[Any], each_step: Step | None = None) -> dict[str, list[int]]:
    """Run the requests to their end; output tokens by request id."""
    served = serve(scheduler, requests, each_step=each_step)
    return {rid: tokens_of(req) for rid, req in served.items()}


class Watch:
    """Looks inside every round: drafts each block alone, and spoils every KV row that is not committed."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.runner = worker.draft_model_runner
        self.original = self.runner.forward
        self.runner.forward = self.forward
        self.alone: list[dict[str, Any]] = []
        self.cache: list[dict[str, int]] = []
        self.not_finite = 0

    def forward(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        import torch
        from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info

        flight = self.worker.in_flight
        out = self.original(forward_batch, *args, **kwargs)
        hidden = out.logits_output.hidden_states.view(forward_batch.batch_size, flight.width, -1).clone()
        width = flight.width
        for i, size in enumerate(flight.block_lens.tolist()):
            prefix = int(forward_batch.seq_lens[i]) + width - size
            if not bool(torch.isfinite(hidden[i, :size]).all()):
                self.not_finite += 1

            def draft_alone(rows: int, i: int = i, prefix: int = prefix) -> torch.Tensor:
                part = slice(i * width, i * width + rows)
                one = dataclasses.replace(
                    forward_batch,
                    batch_size=1,
                    input_ids=forward_batch.input_ids[part],
                    positions=forward_batch.positions[part],
                    input_embeds=forward_batch.input_embeds[part],
                    out_cache_loc=forward_batch.out_cache_loc[part],
                    req_pool_indices=forward_batch.req_pool_indices[i : i + 1],
                    seq_lens=torch.tensor([prefix]),
                    seq_lens_cpu=torch.tensor([prefix]),
                    seq_lens_sum=prefix,
                    spec_info=make_draft_block_spec_info(draft_token_num=rows, device="cpu"),
                    global_num_token_non_padded_cpu=rows,
                )
                return self.original(one).logits_output.hidden_states.view(rows, -1)

            alone = draft_alone(size)
            whole = draft_alone(width)[:size]
            scale = float(alone.abs().max())
            self.alone.append(
                {
                    "size": size,
                    "width": width,
                    "batch": forward_batch.batch_size,
                    "difference": float((hidden[i, :size] - alone).abs().max()) / scale,
                    "clipped": float((hidden[i, :size] - whole).abs().max()) / scale,
                }
            )
        self._spoil(self.runner, forward_batch.out_cache_loc)
        return out

    @staticmethod
    def _spoil(runner: Any, slots: Any) -> None:
        pool = runner.token_to_kv_pool
        for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
            pool.get_key_buffer(layer)[slots.long()] = float("nan")
            pool.get_value_buffer(layer)[slots.long()] = float("nan")

    def after_step(self, batch: Any, result: Any) -> None:
        """Committed rows of the draft's cache: the finite ones, before everything behind them is spoiled."""
        import torch

        if result.accept_lens is None:
            return
        table = self.worker.model_runner.req_to_token_pool.req_to_token
        pool = self.runner.token_to_kv_pool
        keys = pool.get_key_buffer(pool.start_layer)
        lengths = zip(result.new_seq_lens.tolist(), result.accept_lens.tolist(), strict=True)
        for req, (new_len, accepted) in zip(batch.reqs, lengths, strict=True):
            if req.finished() or req.kv.req_pool_idx is None:
                continue
            # The context and the round's block: what lies behind was never written.
            slots = table[req.kv.req_pool_idx, : new_len - accepted + B_MAX].long()
            finite = torch.isfinite(keys[slots]).flatten(1).all(1)
            reached = int(finite.long().cumprod(0).sum())
            self.cache.append({"committed": new_len, "cached": reached, "finite": int(finite.sum())})
            # What the next round reserves holds garbage, in the target's cache too.
            self._spoil(self.runner, slots[new_len:])
            self._spoil(self.worker.model_runner, slots[new_len:])


def main(output: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp(prefix="graft-probe-"))
    target, draft = build(folder)
    replay = folder / "replay.json"
    replay.write_text(json.dumps({"random": {"seed": 11, "low": 1, "high": B_MAX}}))
    config = {"blockpilot": {"policy": "replay", "policy_file": str(replay), "widths": [B_MAX]}}
    scheduler = start(
        target,
        draft,
        config,
        *("--speculative-num-draft-tokens", str(B_MAX), "--max-total-tokens", "8192"),
        *("--chunked-prefill-size", "32", "--disable-radix-cache"),
    )
    worker = scheduler.draft_worker
    sampled = {"temperature": 1.0, "top_p": 0.9}
    kinds = {"greedy": {"temperature": 0.0}, "seeded": sampled}

    def requests(name: str, settings: dict | None) -> list[Any]:
        return [
            request(
                scheduler,
                f"{name}-{kind}-{i}",
                prompt,
                settings,
                TOKENS,
                ignore_eos=True,
                sampling_seed=100 + i,
                **kinds[kind],
            )
            for kind in kinds
            for i, prompt in enumerate(PROMPTS)
        ]

    found: dict[str, Any] = {}
    found["plain"] = answers(scheduler, requests("plain", {"speculate": False}))
    found["random"] = answers(scheduler, requests("random", None))
    found["fixed"] = answers(scheduler, requests("fixed", {"block_size": 4}))
    status = status_of(worker)
    watch = Watch(worker)
    found["watched"] = answers(scheduler, requests("watched", None), watch.after_step)
    found |= {
        "alone": watch.alone,
        "cache": watch.cache,
        "not_finite": watch.not_finite,
        "status": status,
        "status_after": status_of(worker),
    }
    worker.state.shape = dataclasses.replace(worker.state.shape, widths=(1, 2, 4, B_MAX))
    import torch

    worker.state.widths = torch.tensor((1, 2, 4, B_MAX))
    worker.state.width_rounds = dict.fromkeys((1, 2, 4, B_MAX), 0)
    worker.draft_model_runner.forward = watch.original
    found["widths"] = answers(scheduler, requests("widths", None))
    found["rounds_by_width"] = worker.state.width_rounds
    found |= with_other_policies(scheduler, worker, requests)
    output.write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads do not end by themselves


def make_predictor() -> Any:
    """An untrained predictor that tells the prompts apart."""
    import torch

    from sgl_graft.blockpilot.predictor import Predictor
    from tests.serving import markov

    torch.manual_seed(3)
    predictor = Predictor(markov.HIDDEN, len(CANDIDATES), width=32).eval()
    with torch.no_grad():
        predictor.fc_out.weight.normal_(0.0, 1.0)
    return predictor


def with_other_policies(scheduler: Any, worker: Any, requests: Any) -> dict[str, Any]:
    """The same requests once under ``mlp``, once under ``ewma``, and once with Graft-TAIL."""
    from sgl_graft.cuda_graph.value_rule import ValueMaps
    from sglang.srt.layers.logits_processor import LogitsProcessor

    from sgl_graft.blockpilot.costs import CostTable
    from sgl_graft.blockpilot.ewma import EwmaPolicy
    from sgl_graft.blockpilot.mlp import MlpPolicy
    from sgl_graft.blockpilot.policy_file import PolicyDocument
    from sgl_graft.blockpilot.tail import TailGraft
    from sgl_graft.config import BlockPilotConfig
    from tests.serving import markov

    found: dict[str, Any] = {}
    state = worker.state
    for module in worker.model_runner.model.modules():
        if isinstance(module, LogitsProcessor):
            module.keep_last_hidden_states = True
    document = PolicyDocument(
        policy="mlp", default=TRAINED, candidates=CANDIDATES, temperatures=(0.0, 1.0), weights="w"
    )
    chosen: dict[str, int] = {}

    class Recorded(MlpPolicy):
        def first(self, prefilled: Any) -> Any:
            sizes = super().first(prefilled)
            assert not set(prefilled.names) & set(chosen), "a policy is asked once per request"
            chosen.update(zip(prefilled.names, sizes.tolist(), strict=True))
            return sizes

    state.policy = Recorded(document, make_predictor())
    found["mlp"] = answers(scheduler, requests("mlp", None))
    found["chosen"] = chosen

    costs = CostTable(seconds={1: {1: 1.0, B_MAX: 1.2}, 8: {1: 1.0, B_MAX: 4.0}})
    state.policy = EwmaPolicy(state.history, CANDIDATES, TRAINED, costs, probe_every=4)
    state.costs = costs
    found["ewma"] = answers(scheduler, requests("ewma", None))
    state.costs = None

    counters = Path(tempfile.mkdtemp(prefix="graft-probe-")) / "counters.json"
    config = BlockPilotConfig(tail_graft=True, collect=counters)
    rows = worker.model_runner.req_to_token_pool.req_to_token.shape[0]
    worker.tail = TailGraft(config, ValueMaps.identity(1), B_MAX, rows, markov.VOCAB)
    worker.blockpilot.tail = worker.tail
    found["tail"] = answers(scheduler, requests("tail", None))
    found["tail again"] = answers(scheduler, requests("tail again", {"block_size": B_MAX}))
    found["tail_status"] = status_of(worker)["tail"]
    found["counters"] = json.loads(counters.read_text())
    return found


def status_of(worker: Any) -> dict[str, Any]:
    from sgl_graft.blockpilot.status import blockpilot_status

    return json.loads(json.dumps(blockpilot_status(worker.blockpilot)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
