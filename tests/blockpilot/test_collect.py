"""Collection against a server that answers by a fixed rule: complete, resumable, and stopping early."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from sgl_graft.blockpilot.collect import Collector, CollectPlan, LabelPrompt, measure_costs, read_runs
from sgl_graft.blockpilot.labels import best_sizes, scores_of

TOKENS = 40
BEST = {1: 6, 2: 4}  # first token of a prompt -> the size at which most is accepted


class Rule(BaseHTTPRequestHandler):
    """Commits more tokens a round the nearer the block size is to the prompt's best."""

    asked: ClassVar[list[tuple[int, int]]] = []

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        size = body["sampling_params"]["custom_params"]["graft"]["block_size"]
        first = body["input_ids"][0]
        self.asked.append((first, size))
        step = 1 if size == 1 else max(1, 4 - abs(size - BEST[first]))
        self.send_response(200)
        self.end_headers()
        tokens = rounds = 0
        total = body["sampling_params"]["max_new_tokens"]
        try:
            while tokens < total:
                tokens, rounds = min(tokens + step, total), rounds + 1
                meta = {"completion_tokens": tokens, "spec_verify_ct": rounds, "finish_reason": None}
                if tokens == total:
                    meta["finish_reason"] = {"type": "length"}
                self.wfile.write(f"data: {json.dumps({'meta_info': meta})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has seen enough


@pytest.fixture
def url():
    Rule.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Rule)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


PROMPTS = (LabelPrompt("a:0", "a", (1, 5, 5)), LabelPrompt("b:0", "b", (2, 5, 5)))
PLAN = CollectPlan(sizes=(3, 4, 5, 6, 7), default=5, tokens=TOKENS, concurrency=2)


def test_every_size_is_really_run_and_labels_are_right(url, tmp_path):
    runs = Collector(url, tmp_path, PLAN).collect(PROMPTS, lambda run: None)
    assert {(run.prompt, run.size) for run in runs} == {(p.key, s) for p in PROMPTS for s in PLAN.sizes}
    assert sorted(Rule.asked) == sorted((p.ids[0], s) for p in PROMPTS for s in PLAN.sizes)
    scores = scores_of(runs, PLAN.sizes)
    labels = best_sizes(scores.accept, PLAN.sizes, PLAN.default)
    assert [PLAN.sizes[i] for i in labels] == [6, 4]


def test_a_size_that_cannot_win_is_stopped(url, tmp_path):
    runs = Collector(url, tmp_path, PLAN).collect(PROMPTS, lambda run: None)
    stopped = {(run.prompt, run.size) for run in runs if run.stopped}
    assert ("a:0", 3) in stopped
    assert not any(run.stopped for run in runs if run.size == BEST[1] and run.prompt == "a:0")
    for run in runs:
        assert run.tokens < TOKENS if run.stopped else run.tokens == TOKENS


def test_an_interrupted_collection_goes_on(url, tmp_path):
    def after_four(run, seen=[]):  # noqa: B006  counts across calls
        seen.append(run)
        if len(seen) == 4:
            raise InterruptedError

    with pytest.raises(BaseExceptionGroup):
        Collector(url, tmp_path, PLAN).collect(PROMPTS, after_four)
    assert 4 <= len(read_runs(tmp_path, "accept")) < 10
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"prompt": "cut o')  # a torn last line costs one run, and nothing else
    before = len(Rule.asked)
    known = len(read_runs(tmp_path, "accept"))
    runs = Collector(url, tmp_path, PLAN).collect(PROMPTS, lambda run: None)
    assert len(runs) == 10 and len(Rule.asked) == before + 10 - known
    Collector(url, tmp_path, PLAN).collect(PROMPTS, lambda run: None)
    assert len(Rule.asked) == before + 10 - known


def test_seeds_are_separate_runs_above_temperature_zero(url, tmp_path):
    plan = CollectPlan(sizes=(4, 5), default=5, tokens=8, temperature=1.0, seeds=3)
    runs = Collector(url, tmp_path, plan).collect(PROMPTS[:1], lambda run: None)
    assert {(run.size, run.seed) for run in runs} == {(s, seed) for s in (4, 5) for seed in (1, 2, 3)}


def test_costs_are_measured_for_every_batch_and_size(url):
    table = measure_costs(url, PROMPTS, (3, 5), (1, 2), tokens=20, machine="test", device="cpu")
    assert {batch: sorted(row) for batch, row in table.seconds.items()} == {1: [1, 3, 5], 2: [1, 3, 5]}
    assert table.rounds > 0
    with pytest.raises(ValueError, match="do not fill one batch of 3"):
        measure_costs(url, PROMPTS, (3,), (3,), tokens=20, machine="test", device="cpu")
