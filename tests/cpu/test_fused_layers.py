"""The CPU kernels against plain torch, one operation at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from sgl_graft.cpu import fused_layers, kernels, native_build

from .compiler import needs_compiler

pytestmark = needs_compiler

TYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.shape == expected.shape
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(64, 48), (50, 37), (3, 16), (130, 200), (1, 5)], ids=str)
def test_linear(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, k = shape
    weight, bias = (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype)
    x = torch.randn(200, k + 8).to(dtype)[:, :k]  # rows of a wider tensor
    every = kernels.linear(x, weight, bias)
    close(every, x.double() @ weight.double().T + bias.double())
    for rows in (1, 2, 5, 6, 7, 13, 96, 97):
        assert torch.equal(kernels.linear(x[:rows], weight, bias), every[:rows]), (
            "a row depends on its company"
        )
    assert kernels.linear(x.reshape(10, 20, k), weight).shape == (10, 20, n)


def test_linear_layers_follow_weight_updates() -> None:
    layer = torch.nn.Module()
    layer.register_parameter("weight", torch.nn.Parameter(torch.randn(32, 16), requires_grad=False))
    layer.quant_method = UnquantizedLinearMethod()
    model = torch.nn.ModuleList([layer])
    assert fused_layers.install(model) == 1
    x = torch.randn(3, 16)
    close(layer.quant_method.apply(layer, x), x @ layer.weight.T)
    layer.weight.copy_(torch.randn(32, 16))  # an update in place
    close(layer.quant_method.apply(layer, x), x @ layer.weight.T)
    layer.weight = torch.nn.Parameter(torch.randn(32, 16), requires_grad=False)  # another tensor
    close(layer.quant_method.apply(layer, x), x @ layer.weight.T)


def test_embeddings_tied_to_the_head_are_still_looked_up() -> None:
    layer = torch.nn.Module()
    layer.register_parameter("weight", torch.nn.Parameter(torch.randn(40, 16), requires_grad=False))
    layer.quant_method = UnquantizedEmbeddingMethod()
    fused_layers.install(torch.nn.ModuleList([layer]))
    ids = torch.tensor([3, 39, 0])
    assert torch.equal(layer.quant_method.embedding(layer, ids), layer.weight[ids])
    x = torch.randn(2, 16)
    close(layer.quant_method.apply(layer, x), x @ layer.weight.T)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [64, 576, 40])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    norm = RMSNorm(width, eps=1e-5)
    norm.weight.data = torch.rand(width).add(0.5).to(dtype)
    x, residual = torch.randn(7, width).to(dtype), torch.randn(7, width).to(dtype)
    close(fused_layers.rms_norm_forward(norm, x), norm.forward_native(x))
    out, total = fused_layers.rms_norm_forward(norm, x, residual)
    expected, expected_total = norm.forward_native(x, residual)
    close(out, expected)
    close(total, expected_total)
    heads = torch.randn(5, 3 * width).to(dtype)[:, width : 2 * width]  # rows of a wider tensor
    close(fused_layers.rms_norm_forward(norm, heads), norm.forward_native(heads))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [16, 1536, 20])
def test_silu_and_mul(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(9, 2 * width).mul(4).to(dtype)
    close(kernels.silu_mul(x), SiluAndMul().forward_native(x))


def test_exponential_is_exact_enough_everywhere() -> None:
    """SiLU from its far negative to its far positive end, against double precision."""
    gate = torch.linspace(-120, 120, 64001)[:64000].view(1000, 64)
    out = kernels.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    expected = torch.nn.functional.silu(gate.double())
    assert ((out - expected).abs() <= 5e-7 * expected.abs() + 1e-36).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "neox"), [(64, 64, True), (32, 16, True), (64, 64, False), (16, 8, False)]
)
def test_rotary_embedding(dim: int, rotary_dim: int, neox: bool, dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(dim, rotary_dim, 512, 10000, neox, torch.float32)
    positions = torch.tensor([0, 5, 511, 17])
    qkv = torch.randn(4, 5 * dim).to(dtype)
    q, k, _ = qkv.split([3 * dim, dim, dim], dim=1)
    expected = rotary.forward_native(positions, q.clone(), k.clone())
    out = fused_layers.rotary_forward(rotary, positions, q, k)
    close(out[0], expected[0])
    close(out[1], expected[1])


def test_one_openmp_runtime() -> None:
    """Our kernels and torch share one pool of threads; two would fight over the cores."""
    assert native_build.load() is not None
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
    assert len(mapped) <= 1, mapped


def test_the_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLGRAFT_HOME", str(tmp_path))
    first = native_build.build()
    stamp = first.stat().st_mtime_ns
    assert native_build.build() == first and first.stat().st_mtime_ns == stamp


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLGRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(native_build.BuildError, match="no-such-compiler"):
        native_build.build()
