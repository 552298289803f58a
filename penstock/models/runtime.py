"""Resolves the settings that depend on configuration, model and device together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from penstock.config import EngineConfig
from penstock.layers.attention import Attention
from penstock.layers.rotary import rotary_parameters
from penstock.models.config import read_int
from penstock.platforms.platform import Platform
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.limits import StepLimits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ALIASES = {"half": "float16", "float": "float32"}
FP8_NAMES = ("fp8", "fp8_e4m3")  # values of kv_cache_dtype
MAX_POSITION = 2**31 - 1
# Models whose learned positions start after the padding token's id.
POSITIONS_BEHIND_PADDING = ("Roberta", "XLMRoberta", "Camembert")


def resolve_limits(
    config: EngineConfig,
    model_config: Mapping[str, Any],
    platform: Platform,
    *,
    num_drafts: int = 0,
    num_lookahead: int = 0,
    adapts_drafts: bool = False,
    drafts_have_chances: bool = False,
    needs_tokens: bool = False,
    drafts_on_host: bool = False,
) -> StepLimits:
    """Fill in defaults for unset limits. Raises for what the model cannot do.

    With `needs_tokens`, a step starts only when the tokens of the previous one are known. With
    `drafts_on_host` that is the default: how many drafts a request has is then known too.
    """
    max_model_len = _max_model_len(config, model_config)
    max_num_seqs = config.scheduler.max_num_seqs or platform.max_num_seqs
    budget = config.scheduler.max_num_batched_tokens
    if budget is None:
        budget = max(platform.max_num_batched_tokens, max_num_seqs)
        if not config.scheduler.enable_chunked_prefill:
            budget = max(budget, max_model_len)
    if not config.scheduler.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            f"without enable_chunked_prefill, max_num_batched_tokens ({budget}) must be at least "
            f"max_model_len ({max_model_len})"
        )
    overlap = config.scheduler.async_scheduling
    if overlap is None:
        overlap = platform.asynchronous and not drafts_on_host
    max_in_flight = 2 if overlap and not needs_tokens else 1
    num_stages = config.parallel.pipeline_parallel_size
    if num_stages > 1 and config.scheduler.async_scheduling is not False:
        max_in_flight = num_stages  # one for each: it knows all tokens of its requests
    if config.parallel.num_lanes > 1:
        max_in_flight = 1  # the steps of all lanes begin and end together
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        max_in_flight=max_in_flight,
        num_stages=num_stages,
        num_drafts=num_drafts,
        num_lookahead=num_lookahead,
        adapts_drafts=adapts_drafts,
        drafts_have_chances=drafts_have_chances,
        long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
    )


@dataclass(frozen=True)
class Dtypes:
    compute: torch.dtype  # of weights and activations
    kv: str  # of the KV cache


def resolve_dtypes(
    config: EngineConfig, model_config: Mapping[str, Any], platform: Platform
) -> Dtypes:
    """Fill in defaults for unset types. Raises for what the device cannot do."""
    dtype = _dtype(config, model_config, platform)
    kv_dtype: str = config.cache.kv_cache_dtype
    if kv_dtype == "auto":
        kv_dtype = next(name for name, candidate in DTYPES.items() if candidate == dtype)
    if kv_dtype == "int8" and platform.device.type != "cpu":
        raise ConfigError(
            f"kv_cache_dtype=int8 is for CPUs, got device={platform.device.type}: "
            "choose fp8, bfloat16 or float16"
        )
    if kv_dtype in FP8_NAMES:
        if platform.device.type == "cpu" and config.device.cpu_backend == "auto":
            raise ConfigError(
                f"kv_cache_dtype={kv_dtype} is for GPUs, got device=cpu: choose int8, or "
                "cpu_backend=torch, which computes it slowly"
            )
        kv_dtype = "float8_e4m3"
    return Dtypes(dtype, kv_dtype)


def keep_trained_length(limits: StepLimits, max_seq_length: int | None) -> StepLimits:
    """The limits of an embedding model that was trained on at most `max_seq_length` tokens."""
    if max_seq_length is None or max_seq_length >= limits.max_model_len:
        return limits
    return msgspec.structs.replace(limits, max_model_len=max_seq_length)


def needs_whole_prompts(model: nn.Module) -> bool:
    """Whether a token's state depends on later tokens, so that prompts cannot be chunked."""
    return any(
        isinstance(module, Attention) and module.kind == "bidirectional"
        for module in model.modules()
    )


def hold_whole_prompts(limits: StepLimits, config: EngineConfig) -> StepLimits:
    """The limits of a model whose prompts cannot be chunked: each must fit into one step."""
    longest, asked = limits.max_model_len, config.scheduler.max_num_batched_tokens
    if asked is not None and asked < longest:
        raise ConfigError(
            f"this model has bidirectional attention, so a prompt must fit into one step: "
            f"max_num_batched_tokens ({asked}) must be at least max_model_len ({longest}); raise "
            f"it to {longest}, or lower max_model_len to {asked}"
        )
    return msgspec.structs.replace(
        limits,
        max_num_batched_tokens=max(limits.max_num_batched_tokens, longest),
        long_prefill_token_threshold=0,
        enable_chunked_prefill=False,
    )


def longest_context(model_config: Mapping[str, Any]) -> int:
    """The model's maximum context length, including its rope scaling."""
    learned = read_int(model_config, "n_positions", 2048)  # GPT-2's name
    length = read_int(model_config, "max_position_embeddings", learned)
    names = model_config.get("architectures")
    names = names if isinstance(names, list) else []  # the registry refuses anything else
    if any(str(name).startswith(POSITIONS_BEHIND_PADDING) for name in names):
        length -= read_int(model_config, "pad_token_id", 1, low=0) + 1
    scaling = rotary_parameters(model_config)
    kind, factor = scaling["rope_type"], scaling.get("factor") or 1.0
    if kind == "yarn":
        length = scaling.get("original_max_position_embeddings") or length
    if kind in ("linear", "dynamic", "yarn"):
        length = int(length * factor)
    if length > MAX_POSITION:
        raise ModelError(
            f"config.json: the context must be at most {MAX_POSITION} tokens, but "
            f"max_position_embeddings and the rope factor make it {length}"
        )
    return length


def _max_model_len(config: EngineConfig, model_config: Mapping[str, Any]) -> int:
    longest = longest_context(model_config)
    asked = config.model.max_model_len
    says_so = model_config.get("max_position_embeddings") is not None  # Mamba has no positions
    if says_so and asked is not None and asked > longest:
        raise ConfigError(
            f"max_model_len must be at most the model's maximum of {longest}, got {asked}"
        )
    return asked or longest


def _dtype(
    config: EngineConfig, model_config: Mapping[str, Any], platform: Platform
) -> torch.dtype:
    if config.model.dtype != "auto":
        return DTYPES[ALIASES.get(config.model.dtype, config.model.dtype)]
    if platform.default_dtype is not None:
        return platform.default_dtype
    name = model_config.get("dtype") or model_config.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or name not in DTYPES:
        raise ModelError(
            f"config.json: dtype {name!r} is not supported; choose one with --dtype: "
            + ", ".join(DTYPES)
        )
    return DTYPES[name] if name != "float32" else torch.bfloat16
