"""A policy is recommended where prompts tell the best size, and only there."""

import json

import pytest
import torch

from sgl_graft.blockpilot.analysis import judge
from sgl_graft.blockpilot.costs import CostTable
from sgl_graft.blockpilot.labels import Scores
from sgl_graft.blockpilot.policy_file import read_policy, write_policy
from sgl_graft.blockpilot.predictor import Head
from sgl_graft.blockpilot.report import Evidence, as_markdown, fit_and_judge, full_report, recommend
from sgl_graft.blockpilot.training import ABLATIONS, OURS, PAPER, Recipe, features, shuffled, train

SIZES = (5, 6, 7, 8, 9, 10, 11)
PROMPTS = 240
QUICK = Recipe(width=32, epochs=60, lr=3e-3, patience=15)


def evidence(telling, costs=None, seed=0):
    """Prompts whose best size is 6 or 10; their hidden states say which, or say nothing."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(PROMPTS, 16, generator=generator)
    wants = (
        torch.where(hidden[:, 0] > 0, 10, 6)
        if telling
        else torch.where(torch.arange(PROMPTS) % 2 == 0, 10, 6)
    )
    distance = (torch.tensor(SIZES).unsqueeze(0) - wants.unsqueeze(1)).abs()
    accept = 3.0 - 0.2 * distance + 0.05 * torch.randn(PROMPTS, len(SIZES), generator=generator)
    scores = Scores(tuple(f"p{i}" for i in range(PROMPTS)), SIZES, accept.double())
    head = Head(torch.randn(128, 16, generator=generator), 128)
    return Evidence(scores, hidden, tuple("ab"[i % 2] for i in range(PROMPTS)), head, 8, costs)


def test_a_policy_that_helps_is_recommended_and_written(tmp_path):
    known = evidence(telling=True)
    report, predictor = full_report(known, QUICK, "accept", batches=(1,))
    section = report["batch 1"]
    assert section["predictor"]["recommended"] and section["predictor"]["fraction"]["mean"] > 0.6
    assert not section["shuffled inputs"]["recommended"]
    assert not section["default"]["recommended"]
    document = recommend(known, report, (0.0, 0.0))
    assert document.policy == "mlp" and document.candidates == (6, 7, 8, 9, 10)
    path = write_policy(tmp_path, document, predictor)
    read, again, reads_logits = read_policy(path)
    assert read == document and not reads_logits
    x = torch.randn(5, 16)
    with torch.no_grad():
        assert torch.equal(again(x), predictor(x))
    page = as_markdown(json.loads(json.dumps(report)), document)
    assert "| shuffled inputs |" in page and "`mlp`" in page and "k = 3" in page


def test_where_nothing_can_be_told_fixed_is_written():
    report, _ = full_report(evidence(telling=False), QUICK, "accept", batches=(1,))
    assert not report["batch 1"]["predictor"]["recommended"]
    document = recommend(evidence(telling=False), report, (0.0, 0.0))
    assert document.policy == "fixed" and document.weights == ""
    assert document.default in (6, 8, 10)


def test_labels_by_time_move_to_short_blocks_where_rows_cost():
    flat, steep = {1: 1.0, 11: 1.01}, {1: 1.0, 11: 9.0}
    known = evidence(telling=True, costs=CostTable(seconds={1: flat, 8: steep}))
    report, _ = full_report(known, QUICK, "time", batches=(1, 8))
    one, eight = (report[f"batch {batch}"]["labels"]["histogram"] for batch in (1, 8))
    assert sum(one[size] for size in (9, 10, 11)) > PROMPTS / 3
    assert eight[5] > PROMPTS * 0.9


def test_every_ablation_trains():
    known = evidence(telling=True)
    for recipe in ABLATIONS.values():
        quick = Recipe(
            width=16, depth=recipe.depth, epochs=2, patience=0, soft=recipe.soft, inputs=recipe.inputs
        )
        _, verdict = fit_and_judge(known.restricted(2), quick, "accept", 1)
        assert verdict.best_fixed in SIZES


def test_the_papers_recipe_is_the_published_one():
    assert (PAPER.width, PAPER.depth, PAPER.dropout) == (2048, 2, 0.2)
    assert (PAPER.lr, PAPER.epochs, PAPER.weight_decay) == (1e-5, 100, 0.0)
    assert not PAPER.soft and PAPER.patience == 0 and PAPER.inputs == "raw"
    assert OURS.soft


def test_inputs_of_the_ablations():
    known = evidence(telling=True)
    logits = known.head.logits(known.hidden)
    assert torch.equal(features(known.hidden, known.head, "raw"), known.hidden)
    softmax = features(known.hidden, known.head, "softmax")
    torch.testing.assert_close(softmax, logits.softmax(1))
    top = features(known.hidden, known.head, "top_k")
    assert top.shape == (PROMPTS, 64) and bool((top.diff(dim=1) <= 0).all())
    scaled = features(known.hidden, known.head, "normalised")
    torch.testing.assert_close(known.head.logits(scaled).std(1), torch.ones(PROMPTS), rtol=1e-4, atol=1e-4)


def test_training_is_repeatable_and_learns():
    known = evidence(telling=True)
    labels = (known.hidden[:, 0] > 0).long()
    targets = torch.nn.functional.one_hot(labels, 2).float()
    first, second = (train(known.hidden, targets, QUICK, seed=1) for _ in range(2))
    other = train(shuffled(known.hidden), targets, QUICK, seed=1)
    x = known.hidden[:20]
    with torch.no_grad():
        assert torch.equal(first(x), second(x))
        assert float((first(known.hidden).argmax(1) == labels).double().mean()) > 0.9
        assert float((other(known.hidden).argmax(1) == labels).double().mean()) < 0.7


def test_the_interval_holds_the_truth_and_shrinks():
    generator = torch.Generator().manual_seed(4)
    value = 2.0 + torch.randn(400, 3, generator=generator).double() * 0.3
    chosen = torch.zeros(400, dtype=torch.long)
    few, many = judge(value[:40], chosen[:40], SIZES[:3]).gain, judge(value, chosen, SIZES[:3]).gain
    assert many.high - many.low < few.high - few.low
    assert few.low <= few.mean <= few.high + 1e-9 or few.mean == pytest.approx(0.0)
