"""Draft weights read from their exact bf16 copies: the same results to the last bit, updates included."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_graft.cpu import fused_layers, kernels, narrow
from sgl_graft.cpu.attention import GraftCpuAttnBackend
from sgl_graft.cpu.layer_stack import LayerStack

from .attention_cases import Pool
from .compiler import needs_compiler
from .test_layer_stack import DIM, HIDDEN, KV_HEADS, Pools, make_layer, norm, scene_of

pytestmark = needs_compiler


def bf16_values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16().float()


@pytest.mark.parametrize("shape", [(64, 48), (51, 37), (8, 576)], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 7, 8, 16, 100])
def test_products_are_the_same(rows: int, shape: tuple[int, int]) -> None:
    weight, bias, x = bf16_values(*shape), torch.randn(shape[0]), torch.randn(rows, shape[1] + 3)[:, :-3]
    copy = narrow.narrow_copy(weight)
    assert copy is not None
    for b in (None, bias):
        assert torch.equal(narrow.linear(x, weight, copy, b), kernels.linear(x, weight, b))


def test_an_updated_weight_is_used() -> None:
    weight, x = bf16_values(64, 48), torch.randn(5, 48)
    copy = narrow.narrow_copy(weight)
    assert copy is not None
    weight.copy_(bf16_values(64, 48))
    assert torch.equal(narrow.linear(x, weight, copy), kernels.linear(x, weight))


def test_other_weights_have_no_copy() -> None:
    assert narrow.narrow_copy(torch.randn(64, 48)) is None
    assert narrow.narrow_copy(bf16_values(64, 48).bfloat16()) is None
    assert narrow.narrow_copy(bf16_values(48, 64).t()) is None


def test_a_layer_whose_weight_got_another_shape() -> None:
    layer = torch.nn.Linear(48, 64, bias=False)
    layer.weight.data = bf16_values(64, 48)
    narrow.attach_copies([layer])
    fused_layers.install(torch.nn.ModuleList([layer]))
    x = torch.randn(5, 48)
    assert torch.equal(layer(x), kernels.linear(x, layer.weight))
    layer.weight.data = bf16_values(80, 48)
    assert torch.equal(layer(x), kernels.linear(x, layer.weight))


def test_layer_stack() -> None:
    scene, case = scene_of("verify")
    rotary = SimpleNamespace(rotary_dim=DIM, is_neox_style=True, cos_sin_cache=torch.randn(256, DIM))
    layers = [make_layer(i, rotary, HIDDEN) for i in range(2)]
    parts = []
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        parts += [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    for part in parts:
        part.weight = part.weight.bfloat16().float()
    slots = scene.pool.k.shape[0]
    backend = GraftCpuAttnBackend(scene.runner)
    backend.token_to_kv_pool = Pools([Pool(slots, KV_HEADS, DIM, torch.float32) for _ in layers])
    backend.init_forward_metadata(case.batch)
    places = case.batch.out_cache_loc
    positions, hidden = torch.randint(0, 256, (places.numel(),)), torch.randn(places.numel(), HIDDEN)
    last = norm()

    def run() -> torch.Tensor:
        stack = LayerStack(layers, [layer.input_layernorm for layer in layers], last)
        return stack.run(backend, backend.plan, hidden, positions, places)[0]

    plain = run()
    narrow.attach_copies(parts)
    assert torch.equal(run(), plain)
    layers[1].mlp.down_proj.weight.mul_(0.5)
    changed = run()
    assert not torch.equal(changed, plain)
    for part in parts:
        del part.__dict__[narrow.ATTRIBUTE]
    assert torch.equal(run(), changed)
