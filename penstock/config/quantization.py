"""The names of quantization methods, and where a config.json has its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.protocol.errors import ConfigError, ModelError

ONLINE = {
    "fp8": "weights in fp8 with a scale a row, activations in fp8 with a scale a token",
    "fp8_per_channel": "the same as fp8",
    "fp8_per_tensor": "weights in fp8 with one scale a matrix",
    "fp8_per_block": "weights in fp8 with a scale for each 128 x 128, activations by 128 columns",
    "int8": "weights and activations in int8; on a CPU in blocks of 32 columns",
    "int8_per_channel": "weights in int8 with a scale a row, activations with a scale a token",
    "int8_per_channel_weight_only": "weights in int8 with a scale a row",
}
"""Methods that quantize a checkpoint of floats while it loads."""

CHECKPOINT = {
    "fp8": "fp8",
    "fbgemm_fp8": "fbgemm_fp8",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "awq": "awq",
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
}
"""Formats of checkpoints, under every name that users and configurations have for them."""

_REQUANTIZE = "take the unquantized checkpoint with --quantization fp8 or int8, or one in {}"
_ANY = "compressed-tensors, GPTQ or AWQ"

REFUSED = {
    "hqq": _REQUANTIZE.format(_ANY),
    "rtn": "take the unquantized checkpoint with --quantization int8 or fp8",
    "bitblas": _REQUANTIZE.format("GPTQ (desc_act=False)"),
    "gptq_bitblas": "load it as what it was made from: set quant_method to gptq",
    "gptq_marlin_24": _REQUANTIZE.format("compressed-tensors without 2:4 sparsity"),
    "marlin": _REQUANTIZE.format("GPTQ"),
    "deepspeedfp": "take the unquantized checkpoint with --quantization fp8",
    "ptpc_fp8": "take the unquantized checkpoint with --quantization fp8_per_channel",
    "experts_int8": "take the unquantized checkpoint with --quantization int8",
    "moe_wna16": "leave the option out: GPTQ and AWQ experts are found by the checkpoint itself",
    "ipex": "leave the option out: AWQ and GPTQ checkpoints run on a CPU as they are",
    "cpu_awq": "leave the option out: AWQ checkpoints run on a CPU as they are",
    "petit_nvfp4": "leave the option out: NVFP4 weights are found by the checkpoint itself",
    "eetq": "take the unquantized checkpoint with --quantization int8_per_channel_weight_only",
    "quanto": _REQUANTIZE.format(_ANY),
    "torchao": _REQUANTIZE.format("compressed-tensors"),
    "aqlm": _REQUANTIZE.format(_ANY),
    "vptq": _REQUANTIZE.format(_ANY),
    "higgs": _REQUANTIZE.format(_ANY),
    "spqr": _REQUANTIZE.format(_ANY),
    "quip": _REQUANTIZE.format(_ANY),
    "fp_quant": _REQUANTIZE.format("compressed-tensors (NVFP4 or MXFP4)"),
    "quark": _REQUANTIZE.format("compressed-tensors"),
    "bitnet": "take a checkpoint in GGUF",
    "gguf": "leave the option out: a .gguf file says itself how it is quantized",
    "squeezellm": _REQUANTIZE.format(_ANY),
    "qqq": _REQUANTIZE.format("compressed-tensors"),
    "tpu_int8": "take the unquantized checkpoint with --quantization int8",
}
"""Methods that there are or were, with what to use instead."""


def check_option(name: str) -> None:
    """Raise ConfigError for a name that --quantization cannot have."""
    if name in ONLINE or name in CHECKPOINT:
        return
    if name in REFUSED:
        raise ConfigError(f"quantization={name} is not supported: {REFUSED[name]}")
    raise ConfigError(
        f"quantization must be one of {', '.join(ONLINE)} (while loading), or what a quantized "
        f"checkpoint says of itself ({', '.join(dict.fromkeys(CHECKPOINT.values()))}), got {name!r}"
    )


def find_quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config`, wherever config.json has it; None: not quantized."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            raw = place.get(key)
            if isinstance(raw, Mapping):
                if raw:
                    return raw
            elif raw is not None:
                raise ModelError(f"config.json: {key} must be an object, got {raw!r:.80}")
    return None
