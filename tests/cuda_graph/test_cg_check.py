"""The comparison behind the GPU check fails when it should, and the command explains itself without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sgl_graft.cuda_graph.check_compare import compare_op, compare_tensors, ulp_distance
from sgl_graft.cuda_graph.dispatch import forced_backend, use_triton

ROOT = Path(__file__).parents[2]


def test_integers_must_be_equal() -> None:
    left = torch.tensor([1, 2, 3])
    assert compare_tensors("op", [left], [left.clone()]).passed
    wrong = compare_tensors("op", [left], [torch.tensor([1, 5, 4])])
    assert not wrong.passed and wrong.mismatches == 2


def test_floats_may_differ_by_four_ulp() -> None:
    one = torch.ones(1)
    near = one
    for distance in range(1, 7):
        near = torch.nextafter(near, torch.tensor([2.0]))
        assert int(ulp_distance(one, near)) == distance
        assert compare_tensors("op", [one], [near]).passed == (distance <= 4)
    tiny = torch.tensor([2.0**-149])
    assert int(ulp_distance(tiny, -tiny)) == 2 and int(ulp_distance(torch.zeros(1), -torch.zeros(1))) == 0


def test_nan_is_near_nothing_but_nan() -> None:
    nan = torch.tensor([float("nan")])
    assert compare_tensors("op", [nan], [nan]).passed
    assert not compare_tensors("op", [nan], [torch.ones(1)]).passed


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match="op: "):
        compare_tensors("op", [torch.ones(1)], [torch.ones(2)])
    with pytest.raises(ValueError):
        compare_tensors("op", [torch.ones(1)], [])


def test_a_wrong_kernel_is_noticed() -> None:
    """Negative control: an op whose two sides differ."""
    value = torch.zeros(1, dtype=torch.long)
    comparison = compare_op("op", lambda: [value + int(use_triton(value))])
    assert not comparison.passed and comparison.mismatches == 1


def test_dispatch_follows_the_device_unless_forced() -> None:
    tensor = torch.zeros(1)
    assert not use_triton(tensor)
    with forced_backend("triton"):
        assert use_triton(tensor)
        with forced_backend("torch"):
            assert not use_triton(tensor)
        assert use_triton(tensor)
    assert not use_triton(tensor)
    with pytest.raises(ValueError, match="cuda_core"), forced_backend("cuda_core"):  # type: ignore[arg-type]
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_the_check_says_so(tmp_path: Path) -> None:
    """From the repository root, with sgl_graft and sglang out of reach, as on a bare GPU machine."""
    output = tmp_path / "check.json"
    blocked = "import sys; sys.modules['sgl_graft'] = sys.modules['sglang'] = None; "
    run = f"sys.argv = ['check', '--output', {str(output)!r}]; import runpy; "
    code = blocked + run + "runpy.run_module('cuda_graph.check', run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "not run: no CUDA device"
    assert json.loads(output.read_text()) == {"status": "not run: no CUDA device"}
