"""Templates are closed, nested and as large as asked; stage plans always fill the same number of slots."""

from __future__ import annotations

import pytest
from cg_trees import property_test
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph.stages import custom_stage_plan, paper_stage_plan, scaled_checkpoints
from sgl_graft.cuda_graph.templates import (
    PAPER_ENVELOPE_COUNTS,
    PAPER_STAGE_COUNTS,
    Template,
    assumed_rank_prior,
    paper_templates,
    paths_from_counts,
    template_for_budget,
    template_from_paths,
)

PRIOR = assumed_rank_prior(8)


def members(template: Template, mask: tuple[bool, ...]) -> set:
    return {path for path, member in zip(template.paths, mask, strict=True) if member}


def assert_closed(paths: set) -> None:
    """With a path come its parent and every lower-ranked sibling."""
    for path in paths:
        assert len(path) == 1 or path[:-1] in paths
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths


priors = st.lists(st.floats(0.01, 1), min_size=2, max_size=8).map(lambda p: tuple(sorted(p, reverse=True)))


@property_test
@given(st.integers(0, 90), st.integers(2, 9), priors)
def test_budget_templates(num_nodes: int, max_depth: int, prior: tuple[float, ...]) -> None:
    if num_nodes > sum(len(prior) ** depth for depth in range(1, max_depth + 1)):
        with pytest.raises(ValueError, match=f"template of {num_nodes} nodes"):
            template_for_budget(num_nodes, max_depth, prior)
        return
    template = template_for_budget(num_nodes, max_depth, prior)
    assert template.num_nodes == num_nodes == sum(template.level_sizes)
    assert len(template.level_sizes) <= max_depth and template.width <= len(prior)
    previous: set = set()
    for count in range(num_nodes + 1):
        kept = members(template, template.best(count))
        assert_closed(kept)
        assert len(kept) == count and previous <= kept
        previous = kept
    assert members(template, template.best(num_nodes // 2)) == set(
        template_for_budget(num_nodes // 2, max_depth, prior).paths
    )


@property_test
@given(priors.filter(lambda prior: len(prior) == 8))
def test_paper_counts_and_nesting(prior: tuple[float, ...]) -> None:
    plan = paper_stage_plan(60, 9, 9, prior)
    assert plan.num_retrieved == (52, 36, 20, 0) and plan.num_draft == (7, 23, 39, 59)
    assert plan.envelope.level_sizes == PAPER_ENVELOPE_COUNTS
    larger = set(plan.envelope.paths)
    assert_closed(larger)
    for counts, mask in zip(PAPER_STAGE_COUNTS, plan.members[:-1], strict=True):
        kept = members(plan.envelope, mask)
        assert_closed(kept)
        assert kept < larger
        assert [sum(len(path) == depth for path in kept) for depth in range(1, 10)] == list(counts)
        larger = kept


def test_order_lists_parents_first() -> None:
    for template in (paper_templates(PRIOR)[0], template_for_budget(40, 7, PRIOR)):
        assert sorted(template.order) == list(range(template.num_nodes))
        for node, father in enumerate(template.fathers):
            assert father < 0 or template.order[father] < template.order[node]


@property_test
@given(st.integers(1, 80), st.integers(1, 9), st.integers(2, 9))
def test_paper_plans_fill_every_slot(slots: int, steps: int, max_depth: int) -> None:
    plan = paper_stage_plan(slots, steps, max_depth)
    totals = [kept + grafted for kept, grafted in zip(plan.num_draft, plan.num_retrieved, strict=True)]
    assert totals == [slots - 1] * plan.num_stages
    assert list(plan.num_draft) == sorted(plan.num_draft) and plan.num_draft[-1] == slots - 1
    assert all(0 <= depth < steps for depth in plan.checkpoints)
    pruned = plan.prune_only()
    assert pruned.num_draft == plan.num_draft and set(pruned.num_retrieved) == {0} and not pruned.backfill


def test_checkpoints_scale_with_the_draft() -> None:
    assert [scaled_checkpoints(steps) for steps in (1, 2, 3, 5, 9)] == [
        (0,),
        (0, 1),
        (0, 1),
        (0, 1, 3),
        (0, 1, 5),
    ]


def test_refusals_name_value_and_remedy() -> None:
    envelope = template_for_budget(10, 3, PRIOR)
    cases = [
        (lambda: template_from_paths([(0,), (0, 1)]), r"\(0, 1\) repeats or lacks"),
        (lambda: template_for_budget(5, 3, (0.1, 0.2)), "never rise"),
        (lambda: paths_from_counts((9,), PRIOR), "offers 8 nodes, 9"),
        (lambda: envelope.best(11), "10 nodes, 11 were asked for"),
        (lambda: paper_stage_plan(0, 5, 5), "slots and max_depth"),
        (lambda: scaled_checkpoints(0), "at least 1 step"),
        (lambda: custom_stage_plan(8, 5, (3, 1), (1, 2, 3), (1, 1, 1), envelope), "must rise"),
        (lambda: custom_stage_plan(8, 5, (5,), (1, 2), (1, 1), envelope), r"0\.\.4"),
        (lambda: custom_stage_plan(8, 5, (1,), (1,), (1, 1), envelope), "make 2 stages"),
        (lambda: custom_stage_plan(8, 5, (1,), (3, 2), (1, 1), envelope), "never fall"),
        (lambda: custom_stage_plan(8, 5, (1,), (4, 7), (4, 0), envelope), "stage 0 wants 4 . 4"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
