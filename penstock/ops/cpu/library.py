"""Loads the shared library: its path, its function signatures, and what is logged without it.

A library built from other sources than those beside it is not used: its signatures may differ, and
a wrong call would end the process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.protocol.errors import OutOfMemory

logger = logging.getLogger(__name__)

STALE = "stale: built from other sources than those beside it; `pip install -e .` builds it again"
FILE_NAME = "libpenstock_cpu.dylib" if sys.platform == "darwin" else "libpenstock_cpu.so"

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_CODES: dict[str, Any] = {
    "p": _POINTER, "i": _INT, "n": ctypes.c_int32, "f": ctypes.c_float, "s": ctypes.c_char_p
}  # fmt: skip
_STATUS = "status"
_NO_MEMORY, _BAD_INDEX = 1, 2  # `Status` in csrc/runtime.hpp

# Arguments and result of each function, by the codes above. A bad status raises.
_SIGNATURES = {
    "penstock_sources": ("", "s"),
    "penstock_isa": ("", "s"),
    "penstock_select_isa": ("s", "n"),
    "penstock_set_threads": ("n", "n"),
    "penstock_threads": ("", "n"),
    "penstock_packed_bytes": ("nii", "i"),
    "penstock_pack": ("npiiip", _STATUS),
    "penstock_embed": ("npiipip", _STATUS),
    "penstock_linear": ("ppiiipi", _STATUS),
    "penstock_add_lora": ("pppipi", _STATUS),
    "penstock_rms_norm": ("piiiiipfp", _STATUS),
    "penstock_add_rms_norm": ("ppiipfpp", _STATUS),
    "penstock_layer_norm": ("piippfp", _STATUS),
    "penstock_silu_mul": ("piip", _STATUS),
    "penstock_rotate": ("piiip", _STATUS),
    "penstock_write_kv": ("pipippi", _STATUS),
    "penstock_attend": ("piippfifpp", _STATUS),
    "penstock_attend_rows": ("piippfip", _STATUS),
    "penstock_decoder_layer": ("pppppipp", _STATUS),
    "penstock_encoder_layer": ("ppp", _STATUS),
    "penstock_choose_tokens": ("piiipippipipipp", _STATUS),
    "penstock_noise": ("piiip", ""),
}


class WeightPart(ctypes.Structure):
    """One packed matrix of those whose outputs a matmul concatenates."""

    _fields_ = [
        ("packed", _POINTER),
        ("type", _INT),
        ("columns", _INT),
        ("first_column", _INT),
    ]


class WeightsStruct(ctypes.Structure):
    """The parts of a linear layer, and its bias."""

    _fields_ = [("parts", _POINTER), ("num_parts", _INT), ("bias", _POINTER)]


class StepStruct(ctypes.Structure):
    """The rows of a step; see `penstock.ops.attention.AttentionMetadata`."""

    _fields_ = [
        ("query_starts", _POINTER),
        ("seq_lens", _POINTER),
        ("block_table", _POINTER),
        ("table_stride", _INT),
        ("table_width", _INT),
        ("num_requests", _INT),
        ("slots", _POINTER),
        ("rows", _INT),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("angle_stride", _INT),
        ("half", _INT),
    ]


class DecoderLayerStruct(ctypes.Structure):
    """A pre-norm decoder layer's weights and sizes."""

    _fields_ = [
        ("input_norm", _POINTER),
        ("output_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("qkv", WeightsStruct),
        ("output", WeightsStruct),
        ("gate_up", WeightsStruct),
        ("down", WeightsStruct),
        ("hidden", _INT),
        ("num_heads", _INT),
        ("intermediate", _INT),
        ("window", _INT),
        ("eps", ctypes.c_float),
        ("qk_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class LoraPart(ctypes.Structure):
    """What an adapter changes in some output columns; see `penstock.ops.lora.PartUpdate`."""

    _fields_ = [
        ("a", _POINTER),
        ("b", _POINTER),
        ("type", _INT),
        ("rank", _INT),
        ("first_column", _INT),
        ("columns", _INT),
        ("multiplier", _POINTER),
        ("shift", _POINTER),
    ]


class LoraUpdate(ctypes.Structure):
    """What an adapter changes in a linear layer."""

    _fields_ = [("parts", _POINTER), ("num_parts", _INT), ("rank", _INT)]


class LoraSlotsStruct(ctypes.Structure):
    """The adapters of a linear layer, by slot."""

    _fields_ = [("updates", _POINTER), ("num_slots", _INT), ("in_features", _INT)]


class DecoderLora(ctypes.Structure):
    """Pointers to the `LoraSlotsStruct` of a decoder layer's matmuls."""

    _fields_ = [
        ("qkv", _POINTER),
        ("output", _POINTER),
        ("gate_up", _POINTER),
        ("down", _POINTER),
    ]


class AdapterStepStruct(ctypes.Structure):
    """The rows of a step by adapter slot; see `penstock.ops.lora.AdapterStep`."""

    _fields_ = [("rows", _POINTER), ("starts", _POINTER), ("num_rows", _INT)]


class LayerNormStruct(ctypes.Structure):
    """A layer norm. A null weight means that there is none."""

    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("eps", ctypes.c_float)]


class EncoderLayerStruct(ctypes.Structure):
    """An encoder layer's weights and sizes."""

    _fields_ = [
        ("attention_norm", LayerNormStruct),
        ("mlp_norm", LayerNormStruct),
        ("qkv", WeightsStruct),
        ("output", WeightsStruct),
        ("up", WeightsStruct),
        ("down", WeightsStruct),
        ("hidden", _INT),
        ("num_heads", _INT),
        ("head_dim", _INT),
        ("intermediate", _INT),
        ("reach", _INT),
        ("activation", _INT),
        ("is_gated", _INT),
        ("norm_first", _INT),
        ("scale", ctypes.c_float),
    ]


class KeyValueRows(ctypes.Structure):
    """Keys and values in rows, for a batch without a cache."""

    _fields_ = [
        ("key", _POINTER),
        ("value", _POINTER),
        ("stride", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
    ]


class Cache(ctypes.Structure):
    """A layer's KV cache, as `penstock.ops.attention` lays it out."""

    _fields_ = [
        ("data", _POINTER),
        ("num_blocks", _INT),
        ("block_stride", _INT),
        ("block_size", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("type", _INT),
    ]


@dataclass(frozen=True)
class Found:
    """The library, or why it is not used."""

    library: ctypes.CDLL | None
    problem: str = ""


def load() -> ctypes.CDLL | None:
    """The library, or None (logged once) if it is missing, stale or does not load."""
    return _find().library


def loaded() -> ctypes.CDLL:
    """The library, for modules that are imported only where there is one."""
    found = load()
    assert found is not None, "this module needs the C++ library"
    return found


def describe() -> str:
    """One line for `collect-env`: the instructions it uses, or why it is not used."""
    found = _find()
    if found.library is None:
        return f"{found.problem}; models run on plain torch"
    isa: bytes = found.library.penstock_isa()
    return f"built, uses {isa.decode()}"


@functools.cache
def _find() -> Found:
    folder = Path(__file__).parent
    found = open_library(folder / FILE_NAME, sources_hash(folder / "csrc"))
    if found.library is None:
        logger.warning(
            "The C++ library for CPUs is not used: %s. Models run on plain torch, slower",
            found.problem,
        )
    return found


def open_library(path: Path, expected_sources: str | None) -> Found:
    """Load a library, unless it reports other sources than expected."""
    if not path.exists():
        return Found(None, "not built (installing penstock with a C++ compiler at hand builds it)")
    try:
        library = ctypes.CDLL(str(path))
        library.penstock_sources.restype = ctypes.c_char_p
        built_from: bytes = library.penstock_sources()
        if expected_sources is not None and built_from.decode() != expected_sources:
            return Found(None, STALE)
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_CODES[code] for code in arguments]
            if result == _STATUS:
                function.restype, function.errcheck = ctypes.c_int32, _check
            else:
                function.restype = _CODES[result] if result else None
    except AttributeError:  # a function is missing
        return Found(None, STALE)
    except OSError as error:
        return Found(None, f"it does not load ({error})")
    return Found(library)


def _check(status: int, function: Any, arguments: tuple[Any, ...]) -> int:
    """Raise the error of a library call. Its output is then undefined."""
    if status == _NO_MEMORY:
        raise OutOfMemory(f"{function.__name__} could not allocate working memory")
    if status == _BAD_INDEX:
        raise IndexError(f"{function.__name__}: row, slot or block out of range")
    return status


def sources_hash(folder: Path) -> str | None:
    """The hash of the sources, as CMakeLists.txt passes it to the library.

    None if there are no sources, as in a wheel, whose library and Python code match.
    """
    if not folder.is_dir():
        return None
    files = sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".hpp"))
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
