"""The ops that the C++ library implements, under the names and promises of `ops.reference`.

They compute in float32. What they cannot take (another dtype, an odd layout) goes to the reference.
Import this module only where `library.load()` gives a library.
"""

from __future__ import annotations

import ctypes

import torch

from penstock.ops import reference
from penstock.ops.attention import AttentionMetadata
from penstock.ops.cpu.dtypes import CACHE_TYPES
from penstock.ops.cpu.library import Cache, Step, load
from penstock.ops.cpu.sampling import choose_tokens
from penstock.protocol.kv import INT8_SCALE_BYTES

__all__ = [
    "ROW_INVARIANT",
    "add_rms_norm",
    "choose_tokens",
    "paged_attention",
    "rms_norm",
    "rotate_pair",
    "silu_mul",
    "write_kv",
]

ROW_INVARIANT = frozenset(
    {
        "rms_norm",
        "add_rms_norm",
        "silu_mul",
        "rotate_pair",
        "write_kv",
        "paged_attention",
        "choose_tokens",
    }
)

_loaded = load()
assert _loaded is not None, "penstock.ops.cpu.ops needs the library"
_rms_norm = _loaded.penstock_rms_norm
_add_rms_norm = _loaded.penstock_add_rms_norm
_silu_mul = _loaded.penstock_silu_mul
_rotate = _loaded.penstock_rotate
_write_kv = _loaded.penstock_write_kv
_attend = _loaded.penstock_attend

_F32 = torch.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference; x may be a view whose last dimension is contiguous."""
    if x.dtype != _F32 or weight.dtype != _F32 or x.dim() not in (2, 3) or x.stride(-1) != 1:
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape)
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
    are_floats = all(tensor.dtype == _F32 for tensor in (x, residual, weight))
    if not (are_floats and x.is_contiguous() and residual.is_contiguous()):
        return reference.add_rms_norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    total = torch.empty_like(x)
    size = x.shape[-1]
    _add_rms_norm(
        x.data_ptr(), residual.data_ptr(), x.numel() // size, size, weight.data_ptr(), eps,
        total.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out, total


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    if x.dtype != _F32 or not x.is_contiguous() or x.dim() != 2:
        return reference.silu_mul(x)
    rows, double = x.shape
    out = torch.empty(rows, double // 2)
    _silu_mul(x.data_ptr(), rows, double // 2, out.data_ptr())
    return out


def rotate_pair(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, in place."""
    if not (_heads_are_dense(query) and _heads_are_dense(key) and _rows_are_dense(cos, sin)):
        return reference.rotate_pair(query, key, cos, sin)
    step = Step(
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
    if not (_heads_are_dense(key) and _heads_are_dense(value) and _is_readable(cache)):
        reference.write_kv(key, value, cache, slot_mapping)
        return
    _write_kv(
        key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
        ctypes.byref(cache_of(cache)), slot_mapping.data_ptr(), key.shape[0],
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
    """As the reference, straight from the cache's blocks; with a `chunk` by the reference."""
    table = metadata.block_table
    is_fit = _heads_are_dense(query) and _is_readable(cache) and table.stride(1) == 1
    is_fit = is_fit and chunk is None and (sinks is None or sinks.dtype == _F32)
    if not is_fit:
        return reference.paged_attention(
            query, cache, metadata, scale, window, softcap, sinks, chunk=chunk
        )
    output = torch.empty(query.shape)
    _attend(
        query.data_ptr(), query.stride(0), query.shape[1], ctypes.byref(cache_of(cache)),
        ctypes.byref(step_of(metadata)), scale, window or 0, softcap or 0.0,
        None if sinks is None else sinks.data_ptr(), output.data_ptr(),
    )  # fmt: skip
    return output


def step_of(
    metadata: AttentionMetadata, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
) -> Step:
    """For the library; good while its tensors live."""
    table = metadata.block_table
    step = Step(
        metadata.query_starts.data_ptr(), metadata.seq_lens.data_ptr(), table.data_ptr(),
        table.stride(0), table.shape[0], metadata.slot_mapping.data_ptr(),
        metadata.slot_mapping.shape[0],
    )  # fmt: skip
    if cos is not None and sin is not None:
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        step.angle_stride, step.half = cos.stride(0), cos.shape[-1]
    return step


def cache_of(cache: torch.Tensor) -> Cache:
    """For the library; good while the tensor lives."""
    _, _, block_size, num_kv_heads, entry = cache.shape
    head_dim = entry - INT8_SCALE_BYTES if cache.dtype == torch.int8 else entry
    return Cache(
        cache.data_ptr(), cache.stride(0), block_size, num_kv_heads, head_dim,
        CACHE_TYPES[cache.dtype],
    )  # fmt: skip


def _heads_are_dense(x: torch.Tensor) -> bool:
    """[n, heads, head_dim] in float32, where a row's heads lie one behind the other."""
    return x.dtype == _F32 and x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _rows_are_dense(cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return cos.dtype == _F32 and cos.stride(-1) == 1 and cos.stride() == sin.stride()


def _is_readable(cache: torch.Tensor) -> bool:
    return cache.dtype in CACHE_TYPES and cache[0].is_contiguous()
