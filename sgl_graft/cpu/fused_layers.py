"""The kernels behind SGLang's own layers: its fused operators, its linear layers and its embeddings.

Everything goes through the engine's seams for out-of-tree platforms: forwards registered by operator class,
and the layers' ``quant_method``, which reads ``layer.weight`` at every call and so follows weight updates.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear

from . import kernels, narrow
from .draft_stack import READ_ROWS


def register(platform_key: str) -> None:
    """Give the engine's fused operators their CPU forwards."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import base, rope_variant, yarn

    if not kernels.available(torch.float32):
        return
    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm_forward, platform_key)
    BaseFusedOp.register_oot_forward(SiluAndMul, silu_and_mul_forward, platform_key)
    plain = base.RotaryEmbedding
    for module in (base, rope_variant, yarn):
        for kind in vars(module).values():
            # A variant that only fills the table differently turns by it in the same way.
            fits = isinstance(kind, type) and issubclass(kind, plain)
            if fits and kind.forward_native is plain.forward_native:
                BaseFusedOp.register_oot_forward(kind, rotary_forward, platform_key)


def rms_norm_forward(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    plain = not (self.fp32_residual or self.cast_x_before_out_mul or self.override_orig_dtype)
    if (
        not plain
        or self.variance_size_override is not None
        or post_residual_addition is not None
        or x.numel() == 0
        or x.shape[-1] != self.hidden_size
        or self.weight.dtype != x.dtype
        or (residual is not None and residual.dtype != x.dtype)
        or not kernels.available(x.dtype)
    ):
        return self.forward_native(x, residual, post_residual_addition)
    out, total = kernels.rms_norm(x, self.weight, self.variance_epsilon, residual)
    return out if residual is None else (out, total)


def silu_and_mul_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not kernels.available(x.dtype):
        return self.forward_native(x)
    return kernels.silu_mul(x)


def rotary_forward(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if (
        offsets is not None
        or fused_set_kv_buffer_arg is not None
        or hasattr(self, "sin_cos_cache")
        or query.dim() != 2
        or key.dim() != 2
        or query.stride(1) != 1
        or key.stride(1) != 1
        or key.dtype != query.dtype
        or self.cos_sin_cache.dtype != torch.float32
        or positions.dtype != torch.int64
        or positions.dim() != 1
        or not kernels.available(query.dtype)
    ):
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    kernels.rotate_(
        query,
        key,
        self.head_size,
        self.rotary_dim,
        self.cos_sin_cache,
        positions.contiguous(),
        self.is_neox_style,
    )
    return query, key


def apply_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    copy: torch.Tensor | None = None,
) -> torch.Tensor:
    """One matrix product by our kernel where it can, else by torch; ``copy`` is the weight in exact bf16."""
    fits = x.dtype == weight.dtype and weight.is_contiguous() and x.numel() > 0
    if not fits or not kernels.available(x.dtype) or (bias is not None and bias.dtype != x.dtype):
        return linear(x, weight, bias)
    if copy is not None and copy.shape == weight.shape and x.dim() == 2 and x.dtype == torch.float32:
        return narrow.linear(x, weight, copy, bias)
    return kernels.linear(x, weight, bias)


def install(model: torch.nn.Module) -> int:
    """Route the model's plain matrix products to the kernels; how many layers that were.

    A quantised or LoRA-wrapped layer keeps its own method.
    """
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

    class CpuLinearMethod(UnquantizedLinearMethod):
        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return apply_linear(x, layer.weight, bias)

    class CpuEmbeddingMethod(UnquantizedEmbeddingMethod):
        """The language-model head; a table tied to it is still looked up as before."""

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            read, copy = getattr(x, READ_ROWS, None), getattr(layer, narrow.ATTRIBUTE, None)
            x = x.to(layer.weight.dtype)
            if read is None:
                return apply_linear(x, layer.weight, bias, copy)
            logits = x.new_zeros((x.shape[0], layer.weight.shape[0]))
            logits[read] = apply_linear(x[read], layer.weight, bias, copy)
            return logits

    if not kernels.available(torch.float32):
        return 0
    installed = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(method) is UnquantizedLinearMethod:
            module.quant_method = CpuLinearMethod()
        elif type(method) is UnquantizedEmbeddingMethod:
            module.quant_method = CpuEmbeddingMethod()
        elif type(module) is torch.nn.Linear:
            module.forward = MethodType(_module_forward, module)  # type: ignore[method-assign]
        else:
            continue
        installed += 1
    return installed


def _module_forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return apply_linear(x, self.weight, self.bias, getattr(self, narrow.ATTRIBUTE, None))
