"""Sizes that cannot work are refused with the key, the value and the remedy."""

import pytest

from sgl_graft.blockpilot.shape import block_shape
from sgl_graft.config import BlockPilotConfig, parse_config


def shape(trained=8, slots=None, **config):
    return block_shape(BlockPilotConfig(**config), trained, slots)


def test_defaults_come_from_the_draft():
    found = shape()
    assert (found.b_max, found.default, found.candidates) == (10, 8, (6, 7, 8, 9, 10))
    assert found.widths == tuple(range(1, 11))


def test_an_unknown_draft_is_taken_as_upstream_does():
    assert shape(trained=None).candidates == (14, 15, 16, 17, 18)


def test_the_servers_slots_bound_what_nobody_asked_for():
    found = shape(slots=7)
    assert (found.b_max, found.default, found.candidates) == (7, 7, (5, 6, 7))
    assert shape(trained=2, slots=4).candidates == (1, 2, 3, 4)


def test_what_was_asked_for_is_kept():
    found = shape(default=4, candidates=(1, 4, 12), widths=(4,))
    assert (found.b_max, found.candidates, found.widths) == (12, (1, 4, 12), (4, 12))


@pytest.mark.parametrize(
    ("slots", "config", "message"),
    [
        (None, {"candidates": (6, 7)}, "lack the default size 8"),
        (8, {"candidates": (6, 8, 9)}, "candidates has 9.*allows 1 to 8"),
        (8, {"default": 9}, "default has 9.*allows 1 to 8"),
        (1, {}, "at least 2 slots"),
        (8, {"verify_len": 9}, "verify_len is 9"),
        (8, {"widths": (4, 16)}, "widths has 16"),
    ],
)
def test_refusals(slots, config, message):
    with pytest.raises(ValueError, match=message):
        shape(slots=slots, **config)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"candidates": [8, 6]}, "rising sizes"),
        ({"candidates": []}, "rising sizes"),
        ({"candidates": [0, 8]}, "rising sizes"),
        ({"candidates": [6, 7], "default": 8}, "lack the default 8"),
        ({"default": 0}, "default"),
        ({"policy": "replay"}, "needs a recording"),
        ({"policy": "guess"}, "policy"),
        ({"collect": "x.json"}, "tail_graft"),
        ({"sizes": [1]}, "unknown key 'blockpilot.sizes'"),
    ],
)
def test_config_refusals(section, message):
    with pytest.raises(ValueError, match=message):
        parse_config({"blockpilot": section}, "test")
