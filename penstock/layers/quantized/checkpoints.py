"""Reads `quantization_config`: one class per format, which gives each layer its scheme."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.config.quantization import CHECKPOINT, ONLINE, REFUSED, find_quantization_config
from penstock.layers.quantized.bitsandbytes import LlmInt8Scheme, TableScheme
from penstock.layers.quantized.compressed_tensors import CompressedTensors
from penstock.layers.quantized.packed import AwqScheme, GptqScheme
from penstock.layers.quantized.patterns import (
    Expression,
    expression_of,
    find_expressions,
    names_in,
    object_in,
)
from penstock.layers.quantized.plan import Kind, Quantization
from penstock.layers.quantized.schemes import (
    Fp4Scheme,
    Fp8Scheme,
    OnlineScheme,
    Scheme,
)
from penstock.ops.quantized import BLOCK
from penstock.protocol.errors import ConfigError, ModelError

# Scales of keys, values and queries: read for an fp8 cache, unused otherwise.
KV_SCALES = (r"\.(k|v|q|kv|prob_output|output)_scale$", r"\.[kvq]_zero_point$")


def choose_quantization(
    config: Mapping[str, Any], option: str | None, num_ranks: int = 1
) -> Quantization | None:
    """The quantization from a model's config.json and --quantization; None: not quantized.

    Raises ModelError for an unsupported checkpoint, ConfigError for an option that contradicts it.
    """
    raw = find_quantization_config(config)
    if raw is None:
        if option is None:
            return None
        if option in ONLINE:
            return _online(option)
        raise ConfigError(
            f"quantization={option} is for checkpoints that are quantized so, but config.json has "
            f"no quantization_config: leave it out, or choose one of {', '.join(ONLINE)}"
        )
    method = _method(raw)
    if option is not None and CHECKPOINT.get(option) != method:
        raise ConfigError(
            f"quantization={option}, but the checkpoint is quantized with {method}: leave it out"
        )
    readers: dict[str, Callable[[Mapping[str, Any]], Uniform | Gptq | CompressedTensors]] = {
        "fp8": _read_fp8,
        "fbgemm_fp8": _read_fbgemm,
        "compressed-tensors": CompressedTensors.read,
        "gptq": _read_gptq,
        "awq": _read_awq,
        "modelopt": _read_modelopt,
        "bitsandbytes": _read_bitsandbytes,
    }
    try:
        if method == "mxfp4":
            return _read_mxfp4(raw, config, num_ranks)
        found = replace(readers[method](raw), expressions=find_expressions(raw))
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: quantization_config cannot be read: {error}") from error
    return found


def _method(raw: Mapping[str, Any]) -> str:
    name = raw.get("quant_method") or raw.get("method")
    if name is None and (_bits_and_bytes(raw, 4) or _bits_and_bytes(raw, 8)):
        name = "bitsandbytes"
    if name is None and "config_groups" in raw:
        name = "compressed-tensors"
    if isinstance(name, str) and name in CHECKPOINT:
        return CHECKPOINT[name]
    if isinstance(name, str) and name in REFUSED:
        raise ModelError(f"config.json: quant_method {name!r} is not supported: {REFUSED[name]}")
    known = ", ".join(dict.fromkeys(CHECKPOINT.values()))
    raise ModelError(
        f"config.json: quant_method {name!r:.80} is not known; supported: {known}: take a "
        "checkpoint in one of these, or the unquantized one with --quantization fp8 or int8"
    )


# -- quantized while loading


@dataclass(frozen=True)
class Online:
    """Quantizes every linear layer, except routers, embeddings and the LM head."""

    own: OnlineScheme
    ignored: tuple[str, ...] = ()
    expressions: tuple[Expression, ...] = ()

    def scheme(self, name: str, kind: Kind) -> Scheme | None:
        is_head = name.rpartition(".")[2] == "lm_head"  # a linear layer in transformers' models
        return self.own if kind == "linear" and not is_head else None


def _online(option: str) -> Online:
    kinds = {
        "fp8": OnlineScheme("fp8", "channel"),
        "fp8_per_channel": OnlineScheme("fp8", "channel"),
        "fp8_per_tensor": OnlineScheme("fp8", "tensor"),
        "fp8_per_block": OnlineScheme("fp8", "block"),
        "int8": OnlineScheme("int8"),
        "int8_per_channel": OnlineScheme("int8"),
        "int8_per_channel_weight_only": OnlineScheme("int8_weight_only"),
    }
    return Online(kinds[option])


# -- one scheme for all layers, with exceptions


@dataclass(frozen=True)
class Uniform:
    """All layers except those in `skipped`."""

    own: Scheme
    skipped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = KV_SCALES
    expressions: tuple[Expression, ...] = ()

    def scheme(self, name: str, kind: Kind) -> Scheme | None:
        return None if is_skipped(name, self.skipped) else self.own


def is_skipped(name: str, patterns: Sequence[str]) -> bool:
    """Whether a list of modules not to convert contains this layer or a module around it.

    An entry matches whole steps of the path (``mlp.gate`` does not match ``mlp.gate_proj``). Stars
    match anything, and ``re:`` starts a regular expression.
    """
    path = f".{name}."
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif "*" in pattern:
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*"):
                return True
        elif f".{pattern.strip('.')}." in path:
            return True
    return False


def _skipped(raw: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(name for key in keys for name in names_in(raw, key))


def _read_fp8(raw: Mapping[str, Any]) -> Uniform:
    activations = _one_of(raw, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = raw.get("weight_block_size")
    skipped = _skipped(raw, "modules_to_not_convert", "ignored_layers")
    if block is not None:
        if block != [BLOCK, BLOCK]:
            raise ModelError(
                f"config.json: weight_block_size {block!r:.80} is not supported, only "
                f"[{BLOCK}, {BLOCK}]"
            )
        if activations == "static":
            raise ModelError("config.json: fp8 by block has dynamic activations, not static ones")
        return Uniform(Fp8Scheme("block", False, "weight_scale_inv"), skipped)
    return Uniform(Fp8Scheme("tensor", activations == "static"), skipped)


def _read_fbgemm(raw: Mapping[str, Any]) -> Uniform:
    return Uniform(Fp8Scheme("channel", False), _skipped(raw, "modules_to_not_convert"))


def _read_modelopt(raw: Mapping[str, Any]) -> Uniform:
    algorithm = _one_of(raw, "quant_algo", ("FP8", "NVFP4"), None)
    skipped = _skipped(raw, "exclude_modules", "ignore")
    if algorithm == "FP8":
        return Uniform(Fp8Scheme("tensor", True), skipped)
    return Uniform(Fp4Scheme("nvfp4", "weight", "weight_scale_2", divides=False), skipped)


def _bits_and_bytes(raw: Mapping[str, Any], bits: int) -> bool:
    return _flag(raw, f"load_in_{bits}bit", _flag(raw, f"_load_in_{bits}bit", False))


def _read_bitsandbytes(raw: Mapping[str, Any]) -> Uniform:
    skipped = (*_skipped(raw, "llm_int8_skip_modules"), "embed_tokens")
    if _bits_and_bytes(raw, 4):
        kind = _one_of(raw, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        return Uniform(TableScheme(kind), skipped)
    if _bits_and_bytes(raw, 8):
        return Uniform(LlmInt8Scheme(), skipped)
    raise ModelError(
        "config.json: quantization_config of bitsandbytes must have load_in_4bit or load_in_8bit"
    )


@dataclass(frozen=True)
class ExpertsOnly:
    """Only experts are quantized."""

    own: Scheme
    ignored: tuple[str, ...] = KV_SCALES
    expressions: tuple[Expression, ...] = ()

    def scheme(self, name: str, kind: Kind) -> Scheme | None:
        return self.own if ".experts" in name and kind == "linear" else None


def _read_mxfp4(
    raw: Mapping[str, Any], config: Mapping[str, Any], num_ranks: int
) -> Quantization | None:
    scheme = Fp4Scheme("mxfp4")
    if config.get("intermediate_size", 0) % (scheme.group_size * num_ranks):
        return None  # a rank's columns would split a quantization group: load as floats
    return ExpertsOnly(scheme)


def _read_awq(raw: Mapping[str, Any]) -> Uniform:
    bits = _one_of(raw, "bits", (4,), raw.get("w_bit", 4))
    _one_of(raw, "version", ("gemm", "GEMM"), "gemm")
    group = raw.get("group_size", raw.get("q_group_size", 128))
    scheme = AwqScheme(bits, group, _flag(raw, "zero_point", True))
    return Uniform(scheme, _skipped(raw, "modules_to_not_convert"))


@dataclass(frozen=True)
class Gptq:
    """One scheme, and others for layers that match the patterns of `dynamic`."""

    own: GptqScheme
    dynamic: tuple[tuple[str, Mapping[str, Any]], ...]
    skipped: tuple[str, ...]
    ignored: tuple[str, ...] = (*KV_SCALES, r"\.qzeros_extra$")
    expressions: tuple[Expression, ...] = ()

    def scheme(self, name: str, kind: Kind) -> Scheme | None:
        if is_skipped(name, self.skipped):
            return None
        for pattern, changes in self.dynamic:
            if re.match(expression_of(pattern), name):
                if pattern.startswith("-:"):
                    return None
                bits = _one_of(changes, "bits", (4, 8), self.own.bits)
                group = changes.get("group_size", self.own.group_size)
                order = _flag(changes, "desc_act", self.own.act_order)
                return replace(self.own, bits=bits, group_size=group, act_order=order)
        return self.own


def _read_gptq(raw: Mapping[str, Any]) -> Gptq:
    bits = _one_of(raw, "bits", (4, 8), None)
    form = _one_of(raw, "checkpoint_format", ("gptq", "gptq_v2"), raw.get("format") or "gptq")
    scheme = GptqScheme(
        bits,
        raw.get("group_size", 128),
        act_order=_flag(raw, "desc_act", False),
        zero_offset=1 if form == "gptq" else 0,
    )
    owner = "quantization_config's dynamic"
    changes = object_in(raw, "dynamic")
    dynamic = tuple((pattern, object_in(changes, pattern, owner)) for pattern in changes)
    return Gptq(scheme, dynamic, _skipped(raw, "modules_to_not_convert"))


def _one_of(raw: Mapping[str, Any], key: str, known: Sequence[Any], default: Any) -> Any:
    value = raw.get(key)
    value = default if value is None else value
    if value not in known:
        options = " or ".join(str(each) for each in known)
        raise ModelError(
            f"config.json: quantization_config's {key} must be {options}, got {value!r}"
        )
    return value


def _flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(
            f"config.json: quantization_config's {key} must be true or false, got {value!r:.80}"
        )
    return value
