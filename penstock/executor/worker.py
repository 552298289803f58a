"""Worker: one rank's model, cache and runner, whoever drives it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from penstock.config import EngineConfig
from penstock.distributed.group import Group
from penstock.executor.backend import Backend, choose_backend
from penstock.executor.base import Capabilities
from penstock.executor.peak import measure_peak_step
from penstock.executor.runtime import Runtime, resolve_runtime
from penstock.executor.step_queue import StepQueue, is_out_of_memory
from penstock.layers.build import Build
from penstock.layers.quantization import Undecided
from penstock.layers.quantized.plan import StoredLayers, assign_methods
from penstock.loading.checkpoint import Checkpoint, open_checkpoint
from penstock.loading.load import fill_dummy, load_weights, own_name
from penstock.loading.source import ModelSource
from penstock.models.registry import build_model
from penstock.platforms.platform import GIB, Platform
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import KVCacheLayout
from penstock.protocol.step import StepMasks, StepPlan, StepResult
from penstock.runner.drafter import Drafter
from penstock.runner.logits_processors import LogitsProcessor, load_processors
from penstock.runner.routed_experts import RoutedExpertsRecorder
from penstock.runner.runner import ModelRunner

if TYPE_CHECKING:
    from penstock.models.registry import LanguageModel

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_BYTES = 4 * GIB


class Worker:
    """Loads the model on construction; `start` allocates the cache and makes it ready to run."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        platform: Platform,
        group: Group,
        processors: Sequence[str | type[LogitsProcessor]] = (),
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self.platform = platform
        self.group = group
        self.runtime: Runtime = resolve_runtime(config, source.config, platform)
        self.processors = load_processors([*config.model.logits_processors, *processors])
        self.drafter = drafter
        self.model = self._load(source)
        self.runner: ModelRunner | None = None
        self.routed_experts: RoutedExpertsRecorder | None = None
        if config.model.enable_return_routed_experts:
            max_rows = max(self.runtime.max_num_batched_tokens, self.runtime.max_num_seqs)
            self.routed_experts = RoutedExpertsRecorder(self.model, max_rows, platform.device)

    @torch.inference_mode()
    def _load(self, source: ModelSource) -> LanguageModel:
        started = time.perf_counter()
        backend = choose_backend(
            self.config, self.platform, self.runtime.dtype, source.gguf, source.config
        )
        self.runtime = dataclasses.replace(self.runtime, dtype=backend.dtype)
        if self.config.cache.kv_cache_dtype == "auto" and backend.kv_dtype is not None:
            self.runtime = dataclasses.replace(self.runtime, kv_dtype=backend.kv_dtype)
        self.choose_tokens = backend.ops.choose_tokens
        build = Build(
            dtype=self.runtime.dtype,
            device=self.platform.device,
            max_model_len=self.runtime.max_model_len,
            ops=backend.ops,
            tp=self.group,
            linear_method=Undecided() if backend.quantization else backend.linear_method,
        )
        try:
            model = build_model(source.config, build, self.config.model.model_impl)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"there is not enough memory for the weights of {source.name}: choose a smaller "
                f"or a quantized model ({str(error).partition(chr(10))[0]:.200})"
            ) from error
        checkpoint = None
        if self.config.load.load_format != "dummy":
            checkpoint = open_checkpoint(source, self.config.load, backend.native_types)
        _quantize(model, backend, checkpoint)
        if checkpoint is None:
            fill_dummy(model, self.config.model.seed)
        else:
            load_weights(
                model,
                model.weights,
                model.convert(checkpoint.tensors()),
                total=len(checkpoint.names()),
                show_progress=self.group.rank == 0,
                ignored=backend.quantization.ignored if backend.quantization else (),
            )
        backend.finish(model)
        model.check()
        size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        logger.info(
            "Loaded %s: %.2f GiB of weights in %.2f s",
            source.name, size / GIB, time.perf_counter() - started,
        )  # fmt: skip
        return model

    def _kv_budget(self) -> int:
        """Bytes the KV cache may take on this rank."""
        if self.config.cache.kv_cache_memory_bytes is not None:
            return self.config.cache.kv_cache_memory_bytes
        available = self.platform.available_memory()
        if self.platform.device.type == "cpu":
            # Pages cost memory only once they are written, so this is a ceiling, not a price.
            return min(available // 4, DEFAULT_CPU_KV_BYTES)
        return self._gpu_kv_budget()

    def _gpu_kv_budget(self) -> int:
        """What a step of the largest size leaves of the share of memory that may be used."""
        share = self.config.cache.gpu_memory_utilization
        total = torch.cuda.get_device_properties(self.platform.device).total_memory
        runtime = self.runtime
        peak = measure_peak_step(
            self.model,
            self.model.kv_specs(runtime.kv_dtype),
            self.platform.device,
            runtime.max_num_batched_tokens,
            runtime.max_num_seqs,
            runtime.max_model_len,
            self.config.cache.block_size,
        )
        used = total - self.platform.available_memory()
        budget = int(total * share) - used - peak
        logger.info(
            "GPU memory: %.2f GiB, of which %.2f may be used; %.2f taken by weights and others, "
            "%.2f needed by the largest step",
            total / GIB, total * share / GIB, used / GIB, peak / GIB,
        )  # fmt: skip
        if budget <= 0:
            raise ConfigError(
                f"no memory is left for the KV cache: of {total / GIB:.2f} GiB, "
                f"gpu_memory_utilization={share} allows {total * share / GIB:.2f}; weights and "
                f"others take {used / GIB:.2f} and a step of {runtime.max_num_batched_tokens} "
                f"tokens {peak / GIB:.2f}: raise gpu_memory_utilization, lower "
                "max_num_batched_tokens or max_num_seqs, or use more GPUs (tensor_parallel_size)"
            )
        return budget

    def start(self, layout: KVCacheLayout, max_model_len: int) -> None:
        """Allocate the cache and the tables."""
        self.runner = ModelRunner(
            self.model,
            self.model.config.vocab_size,
            layout,
            self.platform.device,
            self.runtime.max_num_seqs,
            max_model_len,
            self.choose_tokens,
            self.processors,
            self.drafter,
            max_num_batched_tokens=self.runtime.max_num_batched_tokens,
            capture_graphs=(
                self.model.can_capture
                and not self.config.device.enforce_eager
                and self.group.size == 1
            ),
            dtype=self.runtime.dtype,
            routed_experts=self.routed_experts,
        )
        self._steps = StepQueue(self.runner)

    def launch(self, plan: StepPlan) -> None:
        """Begin a step; see `Executor` for what a failure does."""
        self._steps.launch(plan)
        if not plan.masked:
            self._steps.sample(None)

    def sample(self, masks: StepMasks | None) -> None:
        """Choose the tokens of the last step, whose plan is `masked`."""
        self._steps.sample(masks)

    def collect(self) -> StepResult:
        """The oldest step's result; only the first rank's has the requests'."""
        result = self._steps.collect()
        return result if self.group.rank == 0 else msgspec.structs.replace(result, results=[])

    def reset(self) -> None:
        """After a step that failed: forget every request, and run steps again."""
        self._steps.reset()

    def capabilities(self) -> Capabilities:
        """What the engine plans with, once the model is loaded."""
        return Capabilities(
            max_model_len=self.runtime.max_model_len,
            max_num_seqs=self.runtime.max_num_seqs,
            max_num_batched_tokens=self.runtime.max_num_batched_tokens,
            kv_dtype=self.runtime.kv_dtype,
            kv_specs=self.model.kv_specs(self.runtime.kv_dtype),
            kv_budget=self._kv_budget(),
            max_in_flight=self._max_in_flight(),
            num_drafts=self.drafter.num_drafts if self.drafter else 0,
        )

    def _max_in_flight(self) -> int:
        overlap = self.config.scheduler.async_scheduling
        if overlap is None:
            overlap = self.platform.asynchronous
        needs_tokens = any(processor.needs_tokens for processor in self.processors)
        return 2 if overlap and not needs_tokens else 1


def _quantize(model: LanguageModel, backend: Backend, checkpoint: Checkpoint | None) -> None:
    """Let the layers of a quantized model know how they are stored."""
    if backend.quantization is None:
        return
    stored = None
    if checkpoint is not None:
        stored = StoredLayers((own_name(name, model.weights), name) for name in checkpoint.names())
    assign_methods(model, backend.quantization, backend.linear_method, stored, backend.take_over)
