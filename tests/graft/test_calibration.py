"""Calibration files: fitted, written, read, refused."""

import json

import pytest
import torch

from sgl_graft.config import GraftConfig
from sgl_graft.graft.calibration import (
    FILE_NAME,
    Calibration,
    fit_maps,
    load_calibration,
    read_calibration,
    write_calibration,
)
from sgl_graft.graft.counters import CandidateCounters


def counters_of(rate):
    """Counters in which a path of probability p was true with chance rate(p)."""
    bins = CandidateCounters.NUM_BINS
    edges = torch.linspace(CandidateCounters.LOWEST_LOG_PROB, 0, bins + 1)
    centres = ((edges[:-1] + edges[1:]) / 2).exp()
    seen = torch.full((2, 3, bins), 10_000)
    true = (10_000 * rate(centres)).long().expand(2, 3, bins).contiguous()
    return {"seen": seen.tolist(), "true": true.tolist()}


def test_maps_recover_the_true_acceptance_and_rise():
    xs, ys = fit_maps(counters_of(lambda p: 0.5 * p))
    maps = Calibration(map_x=xs, map_y=ys).value_maps()
    assert maps.x.shape[:2] == (2, 3)
    torch.testing.assert_close(maps.y, 0.5 * maps.x, atol=0.01, rtol=0.05)


def test_an_unseen_depth_takes_the_one_above_it():
    counters = counters_of(lambda p: p)
    for table in counters.values():
        table[1][2] = [0] * CandidateCounters.NUM_BINS
    xs, ys = fit_maps(counters)
    assert ys[1][2] == ys[1][1] and xs[1][2] == xs[1][1]


def test_round_trip_and_packaged_lookup(tmp_path):
    xs, ys = fit_maps(counters_of(lambda p: p))
    calibration = Calibration(target="t", vocab_size=10, map_x=xs, map_y=ys, thresholds={0: 0.2})
    write_calibration(tmp_path / FILE_NAME, calibration)
    assert load_calibration(GraftConfig(), str(tmp_path), 10) == calibration
    assert calibration.thresholds_for((0, 1)) == (0.2, 0.14)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be used"),
        (json.dumps({"format": 99}), "format 99"),
        (json.dumps({"format": 1, "unknown": 1}), "unknown"),
        (json.dumps({"map_x": [[[0.0, 0.0]]] * 2, "map_y": [[[0.0, 1.0]]] * 2}), "rise"),
        (json.dumps({"vocab_size": 11}), "vocabulary"),
    ],
)
def test_unusable_files_are_refused_with_the_remedy(tmp_path, content, reason):
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=reason) as refusal:
        read_calibration(path, 10)
    assert "sgl-graft calibrate" in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be used"):
        read_calibration(tmp_path / "nothing.json", 10)
