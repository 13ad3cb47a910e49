"""A run of decoder layers in one call against the same layers written in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from sgl_graft.cpu.attention import GraftCpuAttnBackend
from sgl_graft.cpu.layer_stack import LayerStack

from .attention_cases import Case, Pool, Scene
from .compiler import needs_compiler

pytestmark = needs_compiler

HIDDEN, HEADS, KV_HEADS, DIM, INTER, EPS = 48, 6, 2, 16, 40, 1e-5


class Pools:
    """One KV pool per layer behind the engine's accessors."""

    def __init__(self, pools: list[Pool]) -> None:
        self.pools = pools

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.pools[layer_id].k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.pools[layer_id].v


def weight(*shape: int) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.randn(*shape) / shape[-1] ** 0.5, bias=None)


def norm() -> SimpleNamespace:
    return SimpleNamespace(weight=torch.rand(HIDDEN) + 0.5, variance_epsilon=EPS)


def make_layer(index: int, rotary: Any, qkv_input: int = HIDDEN) -> Any:
    attention = SimpleNamespace(
        qkv_proj=weight((HEADS + 2 * KV_HEADS) * DIM, qkv_input),
        o_proj=weight(HIDDEN, HEADS * DIM),
        attn=SimpleNamespace(layer_id=index, scaling=DIM**-0.5),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        rotary_emb=rotary,
    )
    attention.qkv_proj.bias = torch.randn((HEADS + 2 * KV_HEADS) * DIM)
    mlp = SimpleNamespace(gate_up_proj=weight(2 * INTER, HIDDEN), down_proj=weight(HIDDEN, INTER))
    return SimpleNamespace(
        self_attn=attention,
        mlp=mlp,
        hidden_size=HIDDEN,
        input_layernorm=norm(),
        post_attention_layernorm=norm(),
    )


def rms(x: torch.Tensor, part: Any) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * part.weight.double()


def rotate(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = table[positions].double().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def reference(
    stack: LayerStack,
    scene: Scene,
    pools: Pools,
    case: Case,
    hidden: torch.Tensor,
    first: Any,
    positions: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Output, the layers' inputs, and the sum before the last norm, in double precision."""
    residual, inputs = hidden.double(), []
    table = stack.rotary.cos_sin_cache
    for i, layer in enumerate(stack.layers):
        inputs.append(residual)
        attention = layer.self_attn
        x = first.double() if i == 0 and first is not None else rms(residual, layer.input_layernorm)
        qkv = x @ attention.qkv_proj.weight.double().T + attention.qkv_proj.bias.double()
        q, k, v = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
        q, k = (rotate(part.view(-1, part.shape[1] // DIM, DIM), table, positions) for part in (q, k))
        pool = pools.pools[i]
        pool.k[case.batch.out_cache_loc] = k.float()
        pool.v[case.batch.out_cache_loc] = v.view(-1, KV_HEADS, DIM).float()
        scene.pool = pool
        attended = scene.reference(q.reshape(-1, HEADS * DIM), case)
        residual = residual + attended @ attention.o_proj.weight.double().T
        gate, up = (
            rms(residual, layer.post_attention_layernorm) @ layer.mlp.gate_up_proj.weight.double().T
        ).chunk(2, dim=1)
        residual = residual + (silu(gate) * up) @ layer.mlp.down_proj.weight.double().T
    return rms(residual, stack.last_norm), inputs, residual


def scene_of(mode: str) -> tuple[Scene, Case]:
    scene = Scene([70, 3, 20], HEADS, KV_HEADS, DIM, torch.float32)
    case = {
        "decode": scene.decode,
        "verify": lambda: scene.verify(8),
        "prefill": lambda: scene.prefill([64, 0, 5]),
    }
    return scene, case[mode]()


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("mode", ["decode", "verify", "prefill"])
def test_stack(mode: str, draft: bool) -> None:
    scene, case = scene_of(mode)
    rotary = SimpleNamespace(rotary_dim=DIM, is_neox_style=True, cos_sin_cache=torch.randn(256, DIM))
    layers = [make_layer(i, rotary, 2 * HIDDEN if draft and i == 0 else HIDDEN) for i in range(3)]
    slots = scene.pool.k.shape[0]
    pools = Pools([Pool(slots, KV_HEADS, DIM, torch.float32) for _ in layers])
    backend = GraftCpuAttnBackend(scene.runner)
    backend.token_to_kv_pool = pools
    stack = LayerStack(layers, [layer.input_layernorm for layer in layers], norm())
    tokens = case.batch.out_cache_loc.numel()
    positions = torch.randint(0, 256, (tokens,))
    hidden = torch.randn(tokens, HIDDEN)
    first = torch.randn(tokens, 2 * HIDDEN) if draft else None

    def check() -> None:
        backend.init_forward_metadata(case.batch)
        assert stack.accepts(backend, positions, case.batch)
        total = torch.empty_like(hidden)
        slots = case.batch.out_cache_loc
        out, kept = stack.run(backend, backend.plan, hidden, positions, slots, [0, 2], first, total)
        expected, inputs, residual = reference(stack, scene, pools, case, hidden, first, positions)
        for got, wanted in zip([out, total, *kept], [expected, residual, inputs[0], inputs[2]], strict=True):
            torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=2e-5)

    check()
    # Weights updated in place, and weights moved.
    layers[1].mlp.down_proj.weight.mul_(0.5)
    layers[2].self_attn.o_proj.weight.data = torch.randn(HIDDEN, HEADS * DIM) / 10
    check()


def test_an_unknown_backend_is_refused() -> None:
    rotary = SimpleNamespace(rotary_dim=DIM, is_neox_style=True, cos_sin_cache=torch.randn(8, DIM))
    layer = make_layer(0, rotary)
    stack = LayerStack([layer], [layer.input_layernorm], norm())
    batch = SimpleNamespace(out_cache_loc=torch.zeros(1, dtype=torch.long))
    assert not stack.accepts(object(), torch.zeros(1, dtype=torch.long), batch)
