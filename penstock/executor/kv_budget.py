"""Decides how much memory the KV cache gets. On a GPU it runs the largest step to measure."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from penstock.config import EngineConfig
from penstock.executor.peak_memory import peak_bytes
from penstock.kvcache.layout import NO_LAYERS, plan_layout
from penstock.models.base import Model
from penstock.ops.attention import AttentionMetadata
from penstock.platforms.platform import GIB, Platform
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import KVCacheSpec, LatentSpec
from penstock.protocol.limits import StepLimits
from penstock.runner.forward import ForwardInputs, forward
from penstock.runner.kv_memory import KVMemory

FIXED_BYTES = 2 * GIB  # for captured graphs, their logits, request tables and step buffers
DEFAULT_CPU_KV_BYTES = 4 * GIB

logger = logging.getLogger(__name__)


def kv_budget(
    config: EngineConfig,
    platform: Platform,
    model: Model,
    kv_specs: Mapping[str, KVCacheSpec],
    limits: StepLimits,
    generates: bool = True,
    draft_specs: Mapping[str, KVCacheSpec] = NO_LAYERS,
    handed_dtype: torch.dtype | None = None,
) -> int:
    """Bytes for the KV cache on this rank, draft layers included."""
    if config.cache.kv_cache_memory_bytes is not None:
        return config.cache.kv_cache_memory_bytes
    available = platform.available_memory()
    if platform.device.type == "cpu":
        # The OS allocates pages when they are first written, so this is only an upper bound.
        num_shares = max(4, 2 * config.parallel.data_parallel_size)
        return min(available // num_shares, DEFAULT_CPU_KV_BYTES)
    return _gpu_kv_budget(
        config, platform, model, kv_specs, limits, generates, draft_specs, handed_dtype
    )


def _gpu_kv_budget(
    config: EngineConfig,
    platform: Platform,
    model: Model,
    kv_specs: Mapping[str, KVCacheSpec],
    limits: StepLimits,
    generates: bool,
    draft_specs: Mapping[str, KVCacheSpec],
    handed_dtype: torch.dtype | None,
) -> int:
    """Usable GPU memory minus what is in use and what the largest step needs."""
    share = config.cache.gpu_memory_utilization
    total = torch.cuda.get_device_properties(platform.device).total_memory
    peak = measure_peak_step(
        model, kv_specs, platform.device, limits, config.cache.block_size, generates, draft_specs,
        handed_dtype,
    )  # fmt: skip
    kept = 0  # embeddings of media
    if limits.encoder_rows and handed_dtype is None:
        from penstock.executor import encoder_memory  # other models need none of it

        kept = encoder_memory.embeddings_bytes(model, limits)
        # Media are encoded before the step, so both use the same memory.
        peak = max(peak, encoder_memory.measure_pass(model, limits, platform.device))
    peak += FIXED_BYTES
    torch.cuda.empty_cache()
    used = total - platform.available_memory()
    budget = int(total * share) - used - peak - kept
    logger.info(
        "GPU memory: %.2f GiB, of which %.2f may be used; %.2f taken by weights and others, "
        "%.2f needed by the largest step, %.2f by embeddings of media",
        total / GIB, total * share / GIB, used / GIB, peak / GIB, kept / GIB,
    )  # fmt: skip
    if budget <= 0:
        media = f", embeddings of media {kept / GIB:.2f}" if kept else ""
        remedy = " or encoder_cache_tokens" if kept else ""
        raise ConfigError(
            f"no memory is left for the KV cache: of {total / GIB:.2f} GiB, "
            f"gpu_memory_utilization={share} allows {total * share / GIB:.2f}; weights and "
            f"others take {used / GIB:.2f} and a step of {limits.max_num_batched_tokens} "
            f"tokens {peak / GIB:.2f}{media}: raise gpu_memory_utilization, lower "
            f"max_num_batched_tokens or max_num_seqs{remedy}, or use more GPUs "
            "(tensor_parallel_size)"
        )
    return budget


@torch.inference_mode()
def measure_peak_step(
    model: Model,
    specs: Mapping[str, KVCacheSpec],
    device: torch.device,
    limits: StepLimits,
    block_size: int,
    generates: bool = True,
    draft_specs: Mapping[str, KVCacheSpec] = NO_LAYERS,
    handed_dtype: torch.dtype | None = None,
) -> int:
    """Bytes that the largest step needs beyond the weights.

    `handed_dtype`: of the states that an earlier pipeline stage hands on; None on the first stage.
    The step runs on a cache that has only the null block. It also compiles kernels, so that the
    first prompt does not wait for them.
    """
    layout = plan_layout(specs, block_size, limits.max_model_len, draft_specs)
    memory = KVMemory(layout, device)
    longest = min(limits.max_model_len, limits.max_num_batched_tokens)
    lengths = [longest] * (limits.max_num_batched_tokens // longest)
    num_rows = sum(lengths)
    starts = torch.tensor(
        list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device
    )
    rows = torch.arange(num_rows, device=device)
    metadata = AttentionMetadata(
        query_starts=starts,
        seq_lens=starts.diff(),
        block_table=torch.zeros(
            (len(lengths), -(-longest // block_size)), dtype=torch.int32, device=device
        ),
        slot_mapping=torch.zeros_like(rows),
        num_decodes=0,
        max_query_len=longest,
        max_seq_len=longest,
        num_prompts=len(lengths),
        num_prompt_rows=num_rows,
    )
    steps = [metadata]
    if any(isinstance(spec, LatentSpec) for spec in specs.values()):
        # Tokens after computed ones use another attention path, with other memory needs.
        steps.append(replace(metadata, num_prompts=0, num_prompt_rows=0))

    def compute() -> None:
        handed = None
        if handed_dtype is not None:
            shape = (model.num_handed, num_rows, model.hidden_size)
            handed = torch.zeros(shape, dtype=handed_dtype, device=device).unbind()
        for step in steps:
            context = memory.context([step] * len(layout.groups), starts, torch.zeros_like(rows))
            inputs = ForwardInputs(torch.zeros_like(rows), rows % longest, context, handed)
            hidden = forward(model, inputs)
            if generates:
                num_samples = limits.max_num_seqs * (1 + limits.num_drafts)
                model.logits(hidden, rows[:num_samples]).float().argmax(-1)
            del context, hidden

    return peak_bytes(device, compute)
