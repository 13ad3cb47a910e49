"""What answers and the status say about proposals."""

from types import SimpleNamespace

import pytest

from sgl_graft import algorithms
from sgl_graft.blockpilot.status import real_proposals
from sgl_graft.serving import request_settings
from sgl_graft.serving.request_settings import check_request, settings_of


@pytest.fixture
def blockpilot(monkeypatch):
    monkeypatch.setenv(algorithms.ALGORITHM_VARIABLE, "BLOCKPILOT")


def meta():
    """As upstream leaves it on a server with 8 slots: 10 rounds of 7 proposals."""
    return {
        "spec_num_proposed_drafts": 70,
        "spec_num_correct_drafts": 12,
        "spec_verify_ct": 10,
        "spec_accept_rate": 12 / 70,
    }


def test_proposals_are_the_rows_that_were_verified(blockpilot):
    info = meta()
    real_proposals(None, None, info, SimpleNamespace(spec_num_cap_tokens=[0, 34]), 1)
    assert info["spec_num_proposed_drafts"] == 24 and info["spec_accept_rate"] == 0.5


def test_a_request_that_was_never_speculated_proposed_nothing(blockpilot):
    info = meta() | {"spec_num_correct_drafts": 0}
    real_proposals(None, None, info, SimpleNamespace(spec_num_cap_tokens=[10]), 0)
    assert info["spec_num_proposed_drafts"] == 0 and info["spec_accept_rate"] == 0.0


def test_other_algorithms_keep_upstreams_figures(monkeypatch):
    monkeypatch.delenv(algorithms.ALGORITHM_VARIABLE, raising=False)
    info = meta()
    real_proposals(None, None, info, SimpleNamespace(spec_num_cap_tokens=[34]), 0)
    assert info == meta()


def request(**settings):
    return SimpleNamespace(custom_params={"graft": settings}, n=1)


@pytest.fixture
def eight_slots(blockpilot, monkeypatch):
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 9}, "block_size is 9.*at most 8 rows"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "4"}, "block_size"),
        ({"speculate": "no"}, "speculate"),
        ({"size": 4}, "size is unknown"),
    ],
)
def test_a_request_with_wrong_settings_is_refused(eight_slots, settings, message):
    with pytest.raises(ValueError, match=message):
        check_request(request(**settings))


def test_a_requests_own_settings_reach_the_worker(eight_slots):
    for settings, expected in (({"block_size": 8}, (8, True)), ({"speculate": False}, (None, False))):
        check_request(request(**settings))
        found = settings_of({"graft": settings})
        assert (found.block_size, found.speculate) == expected


def test_samples_of_one_prompt_keep_their_block_size(eight_slots, monkeypatch):
    """Where groups share a table the samples get a label, beside what the user set."""
    grouped = SimpleNamespace(graft=SimpleNamespace(table=SimpleNamespace(scope="group")))
    monkeypatch.setattr(request_settings, "current_config", lambda: grouped)
    asked = request(block_size=3)
    asked.n = 2
    check_request(asked)
    assert settings_of(asked.custom_params).block_size == 3
    assert settings_of(asked.custom_params).group.startswith("~")
