"""The CPU kernels as functions of tensors."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from .native_build import load

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_LANES = 16
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class AttentionProblem(ctypes.Structure):
    """``Problem`` in ``native/attention.cpp``: who sees which keys."""

    _fields_ = (
        ("batch", _INT),
        ("kv_heads", _INT),
        ("group", _INT),
        ("dim", _INT),
        ("value_dim", _INT),
        ("q_stride", _INT),
        ("k_stride", _INT),
        ("v_stride", _INT),
        ("table", _POINTER),
        ("table_stride", _INT),
        ("table_rows", _POINTER),
        ("query_start", _POINTER),
        ("prefix", _POINTER),
        ("window", _POINTER),
        ("mask", _POINTER),
        ("mask_stride", _INT),
        ("mask_width", _INT),
        ("scale", ctypes.c_float),
    )


class StackShape(ctypes.Structure):
    """``Stack`` in ``native/layers.cpp``: what a run of decoder layers has in common."""

    _fields_ = (
        ("layers", _INT),
        ("hidden", _INT),
        ("qkv_input", _INT),
        ("heads", _INT),
        ("kv_heads", _INT),
        ("dim", _INT),
        ("intermediate", _INT),
        ("rotary_dim", _INT),
        ("cos_sin", _POINTER),
        ("neox", _INT),
        ("eps", ctypes.c_float),
    )


class LayerPointers(ctypes.Structure):
    """``Layer`` in ``native/layers.cpp``."""

    _fields_ = tuple(
        (name, _POINTER)
        for name in (
            "input_norm",
            "qkv",
            "qkv_bias",
            "out_proj",
            "post_norm",
            "gate_up",
            "down",
            "k_pool",
            "v_pool",
            "capture",
            "qkv_narrow",
            "out_proj_narrow",
            "gate_up_narrow",
            "down_narrow",
        )
    )


_SIGNATURES: dict[str, list[Any]] = {
    "linear": [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT],
    "rms_norm": [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, ctypes.c_float],
    "silu_mul": [_POINTER, _INT, _POINTER, _INT, _INT],
    "rotate": [*[_POINTER, _INT, _INT] * 2, _INT, _INT, _POINTER, _POINTER, _INT, ctypes.c_int32],
    "attention": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER],
    "layers": [_POINTER] * 7 + [_INT] + [_POINTER] * 3,
}


@functools.lru_cache(maxsize=1)
def _functions() -> dict[tuple[str, torch.dtype], Any]:
    library = load()
    found: dict[tuple[str, torch.dtype], Any] = {}
    if library is None:
        return found
    for name, signature in _SIGNATURES.items():
        for dtype, suffix in _NAMES.items():
            function = getattr(library, f"graft_{name}_{suffix}")
            function.argtypes = signature
            function.restype = None
            found[name, dtype] = function
    return found


@functools.lru_cache(maxsize=1)
def _write_rows() -> Any:
    library = load()
    assert library is not None
    function = library.graft_write_rows
    function.argtypes = [_POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT]
    function.restype = None
    return function


def available(dtype: torch.dtype) -> bool:
    """Whether the kernels can be used for tensors of this type."""
    return dtype in _NAMES and load() is not None


def attention_fits(head_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether the attention kernel serves heads of this size."""
    return head_dim % _LANES == 0 and value_dim % _LANES == 0 and available(dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as [rows, width] with neighbouring elements side by side."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def linear(
    x: torch.Tensor,  # [..., k]
    weight: torch.Tensor,  # [n, k]
    bias: torch.Tensor | None = None,  # [n]
) -> torch.Tensor:  # [..., n]
    """``F.linear``; a row's result does not depend on how many rows there are."""
    flat = _rows(x)
    rows, width = flat.shape
    columns = weight.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype)
    _functions()["linear", x.dtype](
        flat.data_ptr(),
        flat.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        columns,
        rows,
        columns,
        width,
    )
    return out if x.dim() == 2 else out.view(*x.shape[:-1], columns)


def rms_norm(
    x: torch.Tensor,  # [..., width]
    weight: torch.Tensor,  # [width]
    eps: float,
    residual: torch.Tensor | None = None,  # like x
) -> tuple[torch.Tensor, torch.Tensor | None]:  # both like x
    """The normalised sum of ``x`` and ``residual``, and the sum itself where there is a residual."""
    flat = _rows(x)
    rows, width = flat.shape
    out = torch.empty((rows, width), dtype=x.dtype)
    total = None
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty_like(residual)
    _functions()["rms_norm", x.dtype](
        flat.data_ptr(),
        flat.stride(0),
        None if residual is None else residual.data_ptr(),
        None if total is None else total.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        width,
        rows,
        width,
        eps,
    )
    return (out if x.dim() == 2 else out.view(x.shape)), total


def rms_norm_into(
    x: torch.Tensor,  # [rows, width]
    weight: torch.Tensor,  # [width]
    eps: float,
    out: torch.Tensor,  # [rows, width], written; may be columns of a wider tensor
) -> None:
    """``rms_norm`` without a residual, into a place that exists."""
    x = _rows(x)
    _functions()["rms_norm", x.dtype](
        x.data_ptr(),
        x.stride(0),
        None,
        None,
        weight.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        x.shape[1],
        eps,
    )


def silu_mul(x: torch.Tensor) -> torch.Tensor:  # [..., 2 * width] -> [..., width]
    """SiLU of the first half times the second half."""
    flat = _rows(x)
    width = flat.shape[1] // 2
    out = torch.empty((flat.shape[0], width), dtype=x.dtype)
    _functions()["silu_mul", x.dtype](flat.data_ptr(), flat.stride(0), out.data_ptr(), flat.shape[0], width)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], width)


def rotate_(
    q: torch.Tensor,  # [tokens, q_heads * head_dim], changed in place
    k: torch.Tensor,  # [tokens, k_heads * head_dim], changed in place
    head_dim: int,
    rotary_dim: int,
    table: torch.Tensor,  # [positions, rotary_dim] fp32: cosines, then sines
    positions: torch.Tensor,  # [tokens] int64
    neox: bool,
) -> None:
    """Rotary position embedding of queries and keys."""
    _functions()["rotate", q.dtype](
        q.data_ptr(),
        q.stride(0),
        q.shape[1] // head_dim,
        k.data_ptr(),
        k.stride(0),
        k.shape[1] // head_dim,
        head_dim,
        rotary_dim,
        table.data_ptr(),
        positions.data_ptr(),
        positions.numel(),
        neox,
    )


def write_rows(
    k: torch.Tensor,  # [tokens, heads, head_dim], heads side by side
    v: torch.Tensor,  # [tokens, heads, value_dim]
    k_pool: torch.Tensor,  # [slots, heads, head_dim]
    v_pool: torch.Tensor,
    slots: torch.Tensor,  # [tokens] int64
) -> None:
    """Write new keys and values into the pool."""
    size = k.element_size()
    _write_rows()(
        k.data_ptr(),
        k.stride(0) * size,
        k_pool.data_ptr(),
        k_pool.stride(0) * size,
        v.data_ptr(),
        v.stride(0) * size,
        v_pool.data_ptr(),
        v_pool.stride(0) * size,
        slots.data_ptr(),
        slots.numel(),
    )


def attention(
    problem: AttentionProblem,
    q: torch.Tensor,  # [tokens, heads * head_dim]
    k_pool: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_pool: torch.Tensor,  # [slots, kv_heads, value_dim]
) -> torch.Tensor:  # [tokens, heads * value_dim]
    """Attention of every query over the keys that ``problem`` shows it."""
    out = torch.empty((q.shape[0], problem.kv_heads * problem.group * problem.value_dim), dtype=q.dtype)
    _functions()["attention", q.dtype](
        ctypes.addressof(problem), q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr()
    )
    return out


def decoder_layers(
    shape: StackShape,
    layers: ctypes.Array[LayerPointers],
    problem: AttentionProblem,
    hidden: torch.Tensor,  # [tokens, hidden]
    first_input: torch.Tensor | None,  # [tokens, qkv_input]
    positions: torch.Tensor,  # [tokens] int64
    slots: torch.Tensor,  # [tokens] int64
    last_norm: torch.Tensor,  # [hidden]
    total: torch.Tensor | None,  # [tokens, hidden], takes the sum before the last norm
) -> torch.Tensor:  # [tokens, hidden]
    """A run of Llama-like decoder layers and the norm behind them."""
    out = torch.empty_like(hidden)
    _functions()["layers", hidden.dtype](
        ctypes.addressof(shape),
        ctypes.addressof(layers),
        ctypes.addressof(problem),
        hidden.data_ptr(),
        None if first_input is None else first_input.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        hidden.shape[0],
        last_norm.data_ptr(),
        None if total is None else total.data_ptr(),
        out.data_ptr(),
    )
    return out
