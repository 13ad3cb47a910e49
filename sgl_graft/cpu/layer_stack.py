"""Llama's decoder layers, and the EAGLE-3 draft's, run by one call into the kernels.

The engine's own layers cost more in Python than in arithmetic when a step has one token. A model is taken
over only if each of its layers is exactly the one this file knows, unsharded, unquantised and without hooks;
every other model, and every batch out of the ordinary, keeps the engine's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch

from . import attention_native, draft_stack, kernels, narrow
from .attention import GraftCpuAttnBackend
from .attention_plan import AttentionPlan


class LayerStack:
    """Decoder layers with the addresses of their weights.

    Addresses are compared with the model's at every run, so weights that an update moved are found.
    """

    def __init__(self, layers: list[Any], norms: list[Any], last_norm: Any) -> None:
        attention, mlp = layers[0].self_attn, layers[0].mlp
        rotary = attention.rotary_emb
        self.layers = layers
        self.first_attention = attention.attn
        self.last_norm = last_norm
        self.rotary = rotary
        self.shape = kernels.StackShape(
            layers=len(layers),
            hidden=layers[0].hidden_size,
            qkv_input=attention.qkv_proj.weight.shape[1],
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            dim=attention.head_dim,
            intermediate=mlp.down_proj.weight.shape[1],
            rotary_dim=rotary.rotary_dim,
            neox=rotary.is_neox_style,
            eps=last_norm.variance_epsilon,
        )
        self.pointers = (kernels.LayerPointers * len(layers))()
        self._names: list[tuple[int, str]] = []
        self._weights: list[torch.Tensor] = []
        for i, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
            for name, weight in {
                "input_norm": norm.weight,
                "qkv": layer.self_attn.qkv_proj.weight,
                "qkv_bias": layer.self_attn.qkv_proj.bias,
                "out_proj": layer.self_attn.o_proj.weight,
                "post_norm": layer.post_attention_layernorm.weight,
                "gate_up": layer.mlp.gate_up_proj.weight,
                "down": layer.mlp.down_proj.weight,
            }.items():
                if weight is not None:
                    self._names.append((i, name))
                    self._weights.append(weight)
        self._addresses: list[int] = []
        self._copies = []  # kept alive: the pointers are bare addresses
        for i, layer in enumerate(layers):
            for name, part in {
                "qkv_narrow": layer.self_attn.qkv_proj,
                "out_proj_narrow": layer.self_attn.o_proj,
                "gate_up_narrow": layer.mlp.gate_up_proj,
                "down_narrow": layer.mlp.down_proj,
            }.items():
                copy = getattr(part, narrow.ATTRIBUTE, None)
                if copy is not None:
                    self._copies.append(copy)
                    setattr(self.pointers[i], name, copy.data_ptr())

    def _refresh(self) -> None:
        addresses = [weight.data_ptr() for weight in self._weights]
        if addresses != self._addresses:
            for (layer, name), address in zip(self._names, addresses, strict=True):
                setattr(self.pointers[layer], name, address)
            self._addresses = addresses
        self.shape.cos_sin = self.rotary.cos_sin_cache.data_ptr()

    def accepts(self, backend: Any, positions: torch.Tensor, forward_batch: Any) -> bool:
        """Whether this forward is an ordinary one."""
        slots = forward_batch.out_cache_loc
        return (
            isinstance(backend, GraftCpuAttnBackend)
            and backend.plan is not None
            and self._plain_pool(backend.token_to_kv_pool)
            and positions.dtype == torch.int64
            and positions.dim() == 1
            and positions.is_contiguous()
            and slots.dtype == torch.int64
            and slots.is_contiguous()
            and slots.numel() == positions.numel() == int(backend.plan.query_start[-1])
            and self.rotary.cos_sin_cache.dtype == torch.float32
        )

    def _plain_pool(self, pool: Any) -> bool:
        keys = pool.get_key_buffer(self.first_attention.layer_id)
        return bool(keys.dtype == self.last_norm.weight.dtype and keys.dim() == 3 and keys.is_contiguous())

    def run(
        self,
        backend: GraftCpuAttnBackend,
        plan: AttentionPlan,
        hidden: torch.Tensor,  # [tokens, hidden]
        positions: torch.Tensor,  # [tokens]
        slots: torch.Tensor,  # [tokens] pool slots of the new keys and values
        captured: Iterable[int] = (),
        first_input: torch.Tensor | None = None,  # [tokens, qkv_input]
        total: torch.Tensor | None = None,  # [tokens, hidden], takes the sum before the last norm
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The normed output, and the inputs of the layers ``captured``."""
        self._refresh()
        pool = backend.token_to_kv_pool
        for i, layer in enumerate(self.layers):
            keys = pool.get_key_buffer(layer.self_attn.attn.layer_id)
            values = pool.get_value_buffer(layer.self_attn.attn.layer_id)
            pointer = self.pointers[i]
            pointer.k_pool, pointer.v_pool, pointer.capture = keys.data_ptr(), values.data_ptr(), None
        kept = []
        for i in captured:
            kept.append(torch.empty_like(hidden))
            self.pointers[i].capture = kept[-1].data_ptr()
        problem = attention_native.problem_of(
            plan, keys, values, self.shape.heads, self.first_attention.scaling, causal=True
        )
        out = kernels.decoder_layers(
            self.shape,
            self.pointers,
            problem,
            hidden.contiguous(),
            first_input,
            positions,
            slots,
            self.last_norm.weight,
            total,
        )
        return out, kept


def _plain_layer(layer: Any, dtype: torch.dtype) -> bool:
    """Whether nothing about the layer's parts is out of the ordinary."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from sglang.srt.layers.radix_attention import AttentionType

    attention, mlp, attn = layer.self_attn, layer.mlp, layer.self_attn.attn
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    kinds = (QKVParallelLinear, RowParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
    return (
        all(type(part) is kind for part, kind in zip(linears, kinds, strict=True))
        and all(type(part.quant_method).__name__ == "CpuLinearMethod" for part in linears)
        and all(part.weight.dtype == dtype and part.weight.is_contiguous() for part in linears)
        and all(part.bias is None for part in linears[1:])
        and not any(part.skip_bias_add for part in linears)
        and type(mlp.act_fn) is SiluAndMul
        and attn.attn_type == AttentionType.DECODER
        and attn.sliding_window_size <= 0
        and not attn.logit_cap
        and not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
    )


def _plain_norm(norm: Any, dtype: torch.dtype) -> bool:
    from sglang.srt.layers.layernorm import RMSNorm

    return (
        type(norm) is RMSNorm
        and norm.weight.dtype == dtype
        and norm.variance_size_override is None
        and not (norm.fp32_residual or norm.cast_x_before_out_mul or norm.override_orig_dtype)
    )


def _stack_of(layers: list[Any], norms: list[Any], last_norm: Any) -> LayerStack | None:
    """The layers as one stack, or None where one of them is special."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    if not layers:
        return None
    attention = layers[0].self_attn
    dtype = attention.qkv_proj.weight.dtype
    rotary = attention.rotary_emb
    every_norm = [*norms, *(layer.post_attention_layernorm for layer in layers), last_norm]
    plain = (
        kernels.attention_fits(attention.head_dim, attention.head_dim, dtype)
        and all(_plain_layer(layer, dtype) for layer in layers)
        and all(_plain_norm(norm, dtype) for norm in every_norm)
        and len({norm.variance_epsilon for norm in every_norm}) == 1
        and all(layer.self_attn.rotary_emb is rotary for layer in layers)
        and isinstance(rotary, RotaryEmbedding)
        and type(rotary).forward_native is RotaryEmbedding.forward_native
        and not hasattr(rotary, "sin_cos_cache")
        and len({layer.self_attn.attn.scaling for layer in layers}) == 1
    )
    return LayerStack(layers, norms, last_norm) if plain else None


def install(model: torch.nn.Module) -> bool:
    """Take over the forward of a Llama or of an EAGLE-3 draft; whether this is such a model."""
    from sglang.srt.models import llama
    from sglang.srt.models.llama_eagle3 import LlamaModel as DraftModel
    from sglang.srt.runtime_context import get_lora, get_parallel

    inner: Any = getattr(model, "model", None)
    parallel = get_parallel()
    if parallel.tp_size > 1 or parallel.pp_size > 1 or getattr(get_lora(), "enable_lora", False):
        return False
    if type(inner) is llama.LlamaModel:
        forward: Callable[..., Any] = _target_forward
        known = all(type(layer) is llama.LlamaDecoderLayer for layer in inner.layers)
        norms = [layer.input_layernorm for layer in inner.layers]
    elif type(inner) is DraftModel:
        forward = draft_stack.forward
        # The first layer's input is put together outside, by norms that must be plain ones, too.
        known = (
            not inner.is_mrope_enabled
            and len(inner.layers) > 0
            and _plain_norm(inner.layers[0].input_layernorm, inner.norm.weight.dtype)
        )
        norms = [layer.hidden_norm for layer in inner.layers]
    else:
        return False
    if known and type(inner) is DraftModel:
        narrow.attach_copies(draft_stack.linear_layers(model))
    stack = _stack_of(list(inner.layers), norms, inner.norm) if known else None
    if stack is None:
        return False
    inner.__dict__["graft_stack"] = stack  # past nn.Module's bookkeeping: the stack owns no parameters
    inner.forward = MethodType(forward, inner)
    return True


def _target_forward(
    self: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    input_embeds: torch.Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    stack, backend = self.graft_stack, draft_stack.attention_backend()
    if not stack.accepts(backend, positions, forward_batch):
        return type(self).forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
    wanted = [i for i in range(len(self.layers)) if i in self.layers_to_capture]
    slots = forward_batch.out_cache_loc
    out, captured = stack.run(backend, backend.plan, hidden, positions, slots, wanted)
    return (out, captured) if captured else out
