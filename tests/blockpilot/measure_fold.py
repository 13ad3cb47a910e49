"""Folded against unfolded predictor on the embedded model: equal choices, memory, time.

    python -m tests.blockpilot.measure_fold

An untrained predictor of the published shape (two layers of 2048) reads the logits of 10,000 hidden states,
some of them real, the others drawn around them. Time is CPU time of one thread.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM

from sgl_graft import models
from sgl_graft.blockpilot.collect import shipped_label_prompts
from sgl_graft.blockpilot.predictor import Head, Predictor, fold

INPUTS = 10_000
REAL = 400
CHUNK = 250
PREFILL = 256
NAME = "smollm2-135m-instruct"


def median_ms(run: object, times: int = 15) -> float:
    assert callable(run)
    run()
    spent = []
    for _ in range(times):
        start = time.thread_time()
        run()
        spent.append(time.thread_time() - start)
    return sorted(spent)[times // 2] * 1e3


@torch.no_grad()
def hidden_states(model: torch.nn.Module, count: int) -> torch.Tensor:  # [count, hidden]
    found: list[torch.Tensor] = []
    for prompt in shipped_label_prompts(NAME, 400):
        ids = torch.tensor([prompt.ids[:512]])
        found.append(model.base_model(ids).last_hidden_state[0])  # type: ignore[operator]
        if sum(map(len, found)) >= REAL:
            break
    real = torch.cat(found)[:REAL]
    noise = torch.randn(count - len(real), real.shape[1])
    return torch.cat((real, real.mean(0) + noise * real.std(0)))


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(models.get(NAME), dtype=torch.float32).eval()
    head = Head(model.get_output_embeddings().weight, model.config.vocab_size)
    published = Predictor(head.vocab_size, 5).eval()
    folded = fold(published, head)
    hidden = hidden_states(model, INPUTS)
    one = hidden[:1]
    logits = head.logits(one)
    prompt = torch.arange(100, 100 + PREFILL).unsqueeze(0)
    prefill = median_ms(lambda: model(prompt), times=5)
    times = {
        "unfolded": median_ms(lambda: published(logits)),
        "folded": median_ms(lambda: folded(one)),
    }
    for name, predictor in (("unfolded", published), ("folded", folded)):
        print(f"{name}: {predictor.num_bytes / 2**20:.1f} MB, {times[name]:.2f} ms a request")
    print(
        f"prefill of {PREFILL} tokens: {prefill:.1f} ms; folded is {times['folded'] / prefill:.2%} of it",
        flush=True,
    )
    different, worst = 0, 0.0
    for rows in hidden.split(CHUNK):
        wanted, got = published(head.logits(rows)), folded(rows)
        different += int((wanted.argmax(1) != got.argmax(1)).sum())
        worst = max(worst, float((wanted - got).abs().max() / wanted.abs().max()))
    print(f"inputs {len(hidden)}, other choice {different}, largest relative difference {worst:.1e}")


if __name__ == "__main__":
    main()
