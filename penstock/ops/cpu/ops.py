"""The ops that the C++ library implements, with the names and contracts of `ops.reference`.

They compute in float32. Unsupported inputs (another dtype or memory layout) go to the reference.
Import this module only if `library.load()` returns a library.
"""

from __future__ import annotations

import ctypes

import torch

from penstock.ops import reference
from penstock.ops.attention import AttentionMetadata
from penstock.ops.cpu.dtypes import CACHE_TYPES
from penstock.ops.cpu.library import Cache, KeyValueRows, StepStruct, loaded
from penstock.ops.cpu.lora import lora_slots
from penstock.ops.cpu.sampling import choose_tokens
from penstock.ops.sampling_cpu import draw_from_share
from penstock.protocol.kv import INT8_SCALE_BYTES

__all__ = [
    "add_rms_norm",
    "choose_tokens",
    "draw_from_share",
    "layer_norm",
    "lora_slots",
    "paged_attention",
    "rms_norm",
    "rotate_pair",
    "silu_mul",
    "varlen_attention",
    "write_kv",
]

_library = loaded()
_rms_norm = _library.penstock_rms_norm
_add_rms_norm = _library.penstock_add_rms_norm
_layer_norm = _library.penstock_layer_norm
_silu_mul = _library.penstock_silu_mul
_rotate = _library.penstock_rotate
_write_kv = _library.penstock_write_kv
_attend = _library.penstock_attend
_attend_rows = _library.penstock_attend_rows

ALL_POSITIONS = 1 << 40  # an unlimited reach

_F32, _I32, _I64 = torch.float32, torch.int32, torch.int64


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference. x may be a view whose last dimension is contiguous."""
    is_fit = x.dtype == _F32 and x.dim() in (2, 3) and x.stride(-1) == 1
    if not (is_fit and _is_vector(weight, _F32, x.shape[-1])):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    _rms_norm(
        x.data_ptr(), x.shape[0], inner, x.stride(0), inner_stride, x.shape[-1],
        weight.data_ptr(), eps, out.data_ptr(),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    size = x.shape[-1]
    are_floats = x.dtype == residual.dtype == _F32 and x.shape == residual.shape
    are_dense = x.is_contiguous() and residual.is_contiguous()
    if not (are_floats and are_dense and _is_vector(weight, _F32, size)):
        return reference.add_rms_norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    total = torch.empty_like(x)
    _add_rms_norm(
        x.data_ptr(), residual.data_ptr(), x.numel() // size, size, weight.data_ptr(), eps,
        total.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out, total


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference."""
    if residual is not None:
        x = x + residual
    size = x.shape[-1]
    is_fit = x.dtype == _F32 and x.is_contiguous() and _is_vector(weight, _F32, size)
    if not (is_fit and (bias is None or _is_vector(bias, _F32, size))):
        return reference.layer_norm(x, weight, bias, eps)
    out = torch.empty_like(x)
    _layer_norm(
        x.data_ptr(), x.numel() // size, size, weight.data_ptr(),
        None if bias is None else bias.data_ptr(), eps, out.data_ptr(),
    )  # fmt: skip
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    if x.dtype != _F32 or not x.is_contiguous() or x.dim() != 2 or x.shape[1] % 2:
        return reference.silu_mul(x)
    rows, double = x.shape
    out = x.new_empty(rows, double // 2)
    _silu_mul(x.data_ptr(), rows, double // 2, out.data_ptr())
    return out


def rotate_pair(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, in place."""
    are_dense = _heads_are_dense(query) and _heads_are_dense(key)
    if not (are_dense and _are_angles(cos, sin, query, key)):
        return reference.rotate_pair(query, key, cos, sin)
    step = StepStruct(
        rows=query.shape[0], cos=cos.data_ptr(), sin=sin.data_ptr(), angle_stride=cos.stride(0),
        half=cos.shape[-1],
    )  # fmt: skip
    for x in (query, key):
        _rotate(x.data_ptr(), x.shape[1], x.stride(0), x.shape[2], ctypes.byref(step))
    return query, key


def write_kv(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """As the reference."""
    rows, *shape = key.shape
    are_dense = _heads_are_dense(key) and _heads_are_dense(value) and key.shape == value.shape
    if not (are_dense and _is_readable(cache) and _is_vector(slot_mapping, _I64, rows)):
        reference.write_kv(key, value, cache, slot_mapping)
        return
    own = cache_of(cache)
    if shape != [own.num_kv_heads, own.head_dim]:
        raise ValueError(f"keys {list(key.shape)} for a cache {list(cache.shape)}")
    _write_kv(
        key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), ctypes.byref(own),
        slot_mapping.data_ptr(), rows,
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, entry]
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """As the reference, without gathering blocks. With a `chunk` the reference runs."""
    rows, num_heads, head_dim = query.shape
    is_fit = _heads_are_dense(query) and _is_readable(cache) and metadata.block_table.stride(1) == 1
    is_fit = is_fit and chunk is None and (sinks is None or _is_vector(sinks, _F32, num_heads))
    if not is_fit:
        return reference.paged_attention(
            query, cache, metadata, scale, window, softcap, sinks, chunk=chunk
        )
    own, step = cache_of(cache), step_of(metadata)
    if (rows, head_dim) != (step.rows, own.head_dim) or num_heads % own.num_kv_heads:
        shapes = f"queries {list(query.shape)}, cache {list(cache.shape)}"
        raise ValueError(f"{step.rows} rows in the step, but {shapes}")
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    _attend(
        query.data_ptr(), query.stride(0), num_heads, ctypes.byref(own), ctypes.byref(step), scale,
        window or 0, softcap or 0.0,
        None if sinks is None else sinks.data_ptr(), output.data_ptr(),
    )  # fmt: skip
    return output


def varlen_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,
    query_starts: torch.Tensor,  # [num_requests + 1]
    scale: float,
    reach: int | None = None,
) -> torch.Tensor:
    """As the reference."""
    rows, num_heads, head_dim = query.shape
    are_dense = all(_heads_are_dense(x) for x in (query, key, value))
    if not are_dense or key.stride() != value.stride():
        return reference.varlen_attention(query, key, value, query_starts, scale, reach)
    num_kv_heads = key.shape[1]
    expected = (rows, num_kv_heads, head_dim)
    if key.shape != expected or value.shape != expected or num_heads % num_kv_heads:
        shapes = f"keys {list(key.shape)}, values {list(value.shape)}"
        raise ValueError(f"queries {list(query.shape)}, but {shapes}")
    kv = KeyValueRows(key.data_ptr(), value.data_ptr(), key.stride(0), num_kv_heads, head_dim)
    step = packed_step_of(query_starts, rows)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    _attend_rows(
        query.data_ptr(), query.stride(0), num_heads, ctypes.byref(kv), ctypes.byref(step), scale,
        ALL_POSITIONS if reach is None else reach, output.data_ptr(),
    )  # fmt: skip
    return output


def packed_step_of(
    query_starts: torch.Tensor,
    rows: int,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,  # [rows, 1, half] each
) -> StepStruct:
    """A step without a cache, as the library takes it. Valid while its tensors live."""
    num_requests = len(query_starts) - 1
    assert _is_vector(query_starts, _I32, num_requests + 1), f"{query_starts.dtype} starts"
    step = StepStruct(query_starts=query_starts.data_ptr(), num_requests=num_requests, rows=rows)
    if angles is not None:
        cos, sin = angles
        for x in angles:
            assert x.dtype == _F32, f"{x.dtype} angles"
            assert x.shape == cos.shape, f"{list(x.shape)}, {list(cos.shape)}"
            assert x.stride() == cos.stride(), "angles lie alike"
            assert x.stride(-1) == 1, "a row's angles lie one behind the other"
        assert len(cos) == rows, f"{len(cos)} angles for {rows} rows"
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        step.angle_stride, step.half = cos.stride(0), cos.shape[-1]
    return step


def step_of(
    metadata: AttentionMetadata, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
) -> StepStruct:
    """A step as the library takes it. Valid while its tensors live.

    The library checks the values itself. With angles, this is built once per step, and everything
    is validated.
    """
    starts, lengths, table = metadata.query_starts, metadata.seq_lens, metadata.block_table
    slots = metadata.slot_mapping
    num_requests, width = table.shape
    rows = len(slots)
    step = StepStruct(
        starts.data_ptr(), lengths.data_ptr(), table.data_ptr(), table.stride(0), width,
        num_requests, slots.data_ptr(), rows,
    )  # fmt: skip
    if cos is not None and sin is not None:
        assert _is_vector(starts, _I32, num_requests + 1), f"{starts.dtype} {list(starts.shape)}"
        assert _is_vector(lengths, _I32, num_requests), f"{lengths.dtype} {list(lengths.shape)}"
        assert _is_vector(slots, _I64, rows), f"{slots.dtype} {list(slots.shape)}"
        assert table.dtype == _I32, f"block tables are int32, got {table.dtype}"
        assert table.stride(1) == 1, "a request's blocks lie one behind the other"
        assert cos.shape == sin.shape, f"{list(cos.shape)}, {list(sin.shape)}"
        assert len(cos) == rows, f"{len(cos)} angles for {rows} rows"
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        step.angle_stride, step.half = cos.stride(0), cos.shape[-1]
    return step


def cache_of(cache: torch.Tensor) -> Cache:
    """The cache as the library takes it. Valid while the tensor lives."""
    num_blocks, _, block_size, num_kv_heads, entry = cache.shape
    head_dim = entry - INT8_SCALE_BYTES if cache.dtype == torch.int8 else entry
    return Cache(
        cache.data_ptr(), num_blocks, cache.stride(0), block_size, num_kv_heads, head_dim,
        CACHE_TYPES[cache.dtype],
    )  # fmt: skip


def _heads_are_dense(x: torch.Tensor) -> bool:
    """Whether x is [n, heads, head_dim] float32 with the heads of a row contiguous."""
    return x.dtype == _F32 and x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _are_angles(
    cos: torch.Tensor, sin: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> bool:
    """Whether both are [n, 1, half], for heads [n, *, head_dim] of at least 2 * half."""
    rows, _, head_dim = query.shape
    key_rows, _, key_dim = key.shape
    shape, strides = cos.shape, cos.stride()
    are_alike = cos.dtype == sin.dtype == _F32 and shape == sin.shape and strides == sin.stride()
    is_fit = shape[:-1] == (rows, 1) and 2 * shape[-1] <= head_dim and strides[-1] == 1
    return are_alike and is_fit and (key_rows, key_dim) == (rows, head_dim)


def _is_vector(x: torch.Tensor, dtype: torch.dtype, size: int) -> bool:
    return x.dtype == dtype and x.shape == (size,) and x.is_contiguous()


def _is_readable(cache: torch.Tensor) -> bool:
    return cache.dtype in CACHE_TYPES and cache[0].is_contiguous()
