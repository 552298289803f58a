"""Builds an engine core from a configuration: executor, KV cache, grammars, scheduler."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from penstock.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.group import EngineGroup
from penstock.executor.base import Capabilities, Executor
from penstock.executor.in_process import InProcessExecutor
from penstock.executor.lanes import LaneExecutor
from penstock.executor.multi_process import MultiProcessExecutor
from penstock.kvcache.layout import longest_request, make_layout
from penstock.kvcache.manager import KVCacheManager
from penstock.loading.source import ModelSource
from penstock.models.division import check_division
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import KVCacheLayout
from penstock.protocol.limits import StepLimits
from penstock.runner.drafter import Drafter
from penstock.runner.logits_processors import LogitsProcessor
from penstock.scheduler.scheduler import Scheduler
from penstock.structured.backend import Tokenize, check_backend
from penstock.structured.manager import GrammarManager
from penstock.structured.vocabulary import Vocabulary, read_vocabulary
from penstock.text.tokenizer import eos_token_ids, load_tokenizer

if TYPE_CHECKING:
    from penstock.engine.kv_events import KVEvents

logger = logging.getLogger(__name__)

SHORTEST_CONTEXT = 2  # tokens: one for the prompt, one for the output


def build_engine(
    config: EngineConfig,
    source: ModelSource,
    processors: Sequence[type[LogitsProcessor]] = (),
    drafter: Drafter | None = None,
) -> EngineCore:
    """Load the model and build an engine core that is ready for requests."""
    executor: Executor
    if config.parallel.node_rank > 0:
        raise ConfigError("node_rank > 0 is for penstock serve: node 0 runs the engine")
    if drafter is not None and config.speculative.speculative_config is not None:
        raise ConfigError("drafter and speculative_config cannot be combined: drop one")
    check_division(config, source)
    if config.parallel.num_ranks == 1 and config.parallel.distributed_executor_backend == "mp":
        executor = InProcessExecutor(config, source, processors, drafter)
    elif processors or drafter:
        raise ConfigError(
            "with tensor_parallel_size or pipeline_parallel_size > 1, or with Ray, the workers are "
            "other processes: give logits processors as module:Class, and a drafter as "
            'speculative_config={"method": "custom", "model": "module:Class"}'
        )
    elif config.parallel.num_lanes > 1:
        executor = LaneExecutor(config)
    else:
        executor = MultiProcessExecutor(config)
    try:
        core: EngineCore
        if isinstance(executor, LaneExecutor):
            core = _assemble_group(config, source, executor)
        else:
            core = _make_core(config, source, executor, *_start(config, executor))
        core.can_profile = config.profiler.settings is not None
        return core
    except BaseException:
        executor.close()
        raise


def _assemble_group(
    config: EngineConfig, source: ModelSource, executor: LaneExecutor
) -> EngineGroup:
    layout, limits = _start(config, executor)
    cores = []
    for index, lane in enumerate(executor.lanes):
        parallel = replace(config.parallel, data_parallel_rank=index)  # for its KV events
        cores.append(_make_core(replace(config, parallel=parallel), source, lane, layout, limits))
    return EngineGroup(cores, executor)


def _start(config: EngineConfig, executor: Executor) -> tuple[KVCacheLayout, StepLimits]:
    """Plan the KV cache and have all ranks allocate it."""
    layout, limits = plan_cache(config, executor.capabilities)
    try:
        executor.call("start", layout, limits)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        raise ConfigError(
            f"no memory for a KV cache of {layout.total_bytes / 2**30:.3g} GiB "
            f"({layout.num_blocks} blocks) and the state of {limits.max_num_seqs} requests "
            f"of {limits.max_model_len} tokens: lower kv_cache_memory_bytes, "
            f"num_gpu_blocks_override, max_num_seqs or max_model_len ({error})"
        ) from error
    return layout, limits


def _make_core(
    config: EngineConfig,
    source: ModelSource,
    executor: Executor,
    layout: KVCacheLayout,
    limits: StepLimits,
) -> EngineCore:
    capabilities = executor.capabilities
    kv_manager = KVCacheManager(
        layout,
        model_fingerprint=source.fingerprint,
        kv_dtype=capabilities.kv_dtype,
        # Where a prompt's tokens see all others, its first ones depend on the last.
        enable_prefix_caching=config.cache.enable_prefix_caching and limits.spans != "prompt",
    )
    grammars = _make_grammars(config, source)
    scheduler = Scheduler(
        limits,
        kv_manager,
        (),
        grammars,
        policy=config.scheduler.scheduling_policy,
        queue_timeout_s=config.scheduler.queue_timeout_s,
        vocab_size=int(source.config["vocab_size"]),
        max_loras=config.lora.max_loras if config.lora.enable_lora else 0,
        max_cpu_loras=config.lora.num_host_adapters,
    )
    kv_events = _open_kv_events(config, kv_manager, capabilities)
    return EngineCore(scheduler, executor, grammars, kv_events)


def _open_kv_events(
    config: EngineConfig, kv_manager: KVCacheManager, capabilities: Capabilities
) -> KVEvents | None:
    settings, keys = config.kv_events.settings, kv_manager.prefix_keys
    if settings is None:
        return None
    if keys is None:
        raise ConfigError(
            "kv_events_config needs a prefix cache: this model has none, or "
            "enable_prefix_caching is off"
        )
    from penstock.engine.kv_events import KVEvents  # imports ZeroMQ

    rank = config.parallel.data_parallel_rank
    medium = "GPU" if capabilities.device == "cuda" else "CPU"
    kv_events = KVEvents(settings, rank, keys.block_size, medium)
    kv_manager.observe(kv_events)
    return kv_events


def _make_grammars(config: EngineConfig, source: ModelSource) -> GrammarManager:
    """Build the grammar manager. It does no work before a request asks for structured output."""
    options = config.structured
    if not config.model.skip_tokenizer_init:  # without a tokenizer there are no grammars
        check_backend(options.structured_outputs_backend)

    def read() -> tuple[Vocabulary, Tokenize]:
        tokenizer = load_tokenizer(source, config.model.tokenizer)
        vocab_size = int(source.config["vocab_size"])
        vocabulary = read_vocabulary(tokenizer, vocab_size, eos_token_ids(source, tokenizer))
        return vocabulary, functools.partial(tokenizer.encode, add_special_tokens=False)

    return GrammarManager(
        options.structured_outputs_backend,
        options.structured_outputs_timeout_s,
        None if config.model.skip_tokenizer_init else read,
    )


def plan_cache(
    config: EngineConfig, capabilities: Capabilities
) -> tuple[KVCacheLayout, StepLimits]:
    """Return the KV cache layout, and the limits with the `max_model_len` that fits it.

    A `max_model_len` from the user must fit. The model's default is lowered to what fits.
    """
    cache, asked, limits = config.cache, config.model.max_model_len, capabilities.limits
    blocks = cache.num_gpu_blocks_override
    layout = make_layout(
        capabilities.kv_specs,
        cache.block_size,
        limits.max_model_len,
        memory_bytes=capabilities.kv_budget if blocks is None else None,
        num_blocks=blocks,
        must_hold=asked or SHORTEST_CONTEXT,
        max_step_tokens=limits.max_num_batched_tokens,
        draft_specs=capabilities.draft_specs,
        num_draft_rows=limits.max_draft_rows,
        stages=capabilities.stages,
    )
    fits = longest_request(layout, limits.max_model_len)
    if fits < limits.max_model_len:
        logger.warning(
            "max_model_len is lowered from %d to %d, which is what the KV cache can hold",
            limits.max_model_len, fits,
        )  # fmt: skip
    if not layout.groups:
        logger.info("No KV cache is needed; requests may have %d tokens", fits)
        return layout, msgspec.structs.replace(limits, max_model_len=fits)
    logger.info(
        "KV cache: %.2f GiB, %d blocks; up to %d requests of at most %d tokens",
        layout.total_bytes / 2**30, layout.num_blocks - 1, limits.max_num_seqs, fits,
    )  # fmt: skip
    return layout, msgspec.structs.replace(limits, max_model_len=fits)
