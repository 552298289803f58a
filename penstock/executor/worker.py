"""Worker: owns one rank's model, cache and runner. The same class serves one rank and many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from penstock.config import EngineConfig
from penstock.config.options import naming_option
from penstock.distributed.mesh import Mesh
from penstock.distributed.stage_link import StageLink
from penstock.executor.base import Capabilities
from penstock.executor.kv_budget import kv_budget
from penstock.executor.step_queue import StepQueue
from penstock.layers.expert_share import has_experts
from penstock.layers.lora import AdapterWeights, guest_slots, make_slots
from penstock.loading.source import ModelSource
from penstock.loading.tasks import choose_task
from penstock.models.assembly import load_model
from penstock.models.runtime import (
    hold_whole_prompts,
    keep_trained_length,
    needs_whole_prompts,
    resolve_limits,
)
from penstock.platforms.platform import Platform
from penstock.protocol.adapter import Adapter
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import KVCacheLayout
from penstock.protocol.limits import StepLimits
from penstock.protocol.step import Settled, StepMasks, StepPlan, StepResult
from penstock.runner.adapters import AdapterStore
from penstock.runner.drafter import Drafter, DraftSetup
from penstock.runner.drafters import make_drafter
from penstock.runner.expert_balance import ExpertBalancer
from penstock.runner.logits_processors import LogitsProcessor, load_processors
from penstock.runner.routed_experts import RoutedExpertsRecorder
from penstock.runner.runner import ModelRunner

if TYPE_CHECKING:
    from penstock.models.pooler import Pooler


class Worker:
    """The constructor loads the model. `start` allocates the cache and the runner."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        platform: Platform,
        mesh: Mesh,
        processors: Sequence[str | type[LogitsProcessor]] = (),
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self.fingerprint = source.fingerprint
        self.platform = platform
        self.mesh = mesh
        self.processors = load_processors([*config.model.logits_processors, *processors])
        task = choose_task(config, source)
        settings = config.speculative.settings
        if settings is not None:
            assert drafter is None, "the caller refuses both"
            if task != "generate":
                raise ConfigError(
                    f"speculative_config is for models that generate text, but this one is used "
                    f"to {task}: drop it, or set runner=generate"
                )
            on_gpu = platform.device.type == "cuda"
            drafter = make_drafter(settings, source.config, on_gpu)
        self.drafter = drafter if mesh.is_last_stage else None  # where tokens are sampled
        self.limits = resolve_limits(
            config,
            source.config,
            platform,
            num_drafts=drafter.num_drafts if drafter else 0,
            num_lookahead=drafter.num_lookahead if drafter else 0,
            adapts_drafts=settings is not None and settings.adaptive,
            drafts_have_chances=drafter is not None and drafter.knows_chances,
            needs_tokens=any(processor.needs_tokens for processor in self.processors),
            drafts_on_host=drafter is not None and drafter.is_on_host,
        )
        files = None
        if task == "embed" and source.modules_folder is not None:
            from penstock.loading.sentence_transformers import read_sentence_transformers

            files = read_sentence_transformers(source.modules_folder)
        if files is not None and config.model.max_model_len is None:
            self.limits = keep_trained_length(self.limits, files.max_seq_length)
        self.model, self.dtypes, self.ops = load_model(
            config, source, platform, mesh, self.limits.max_model_len
        )
        if self.model.media_width:
            from penstock.models.vision import media_limits  # other models need none of it

            self.limits = media_limits(self.model, self.limits, config)
        if drafter is not None:
            with naming_option("speculative_config"):
                setup = DraftSetup(self.model, config, source, platform, mesh, self.limits)
                drafter.choose_layers(setup)
                if self.drafter is not None:
                    self.drafter.load(setup)
        if needs_whole_prompts(self.model):
            self.limits = hold_whole_prompts(self.limits, config)
        self.pooler: Pooler | None = None
        if task != "generate" and mesh.is_last_stage:
            from penstock.models.pooler import make_pooler  # language models need none of it

            self.pooler = make_pooler(self.model, task, config, source, files)
        self.adapters = self._make_adapters()
        self.runner: ModelRunner | None = None
        self.routed_experts: RoutedExpertsRecorder | None = None
        self.balancer: ExpertBalancer | None = None
        returns, eplb = config.model.enable_return_routed_experts, config.parallel.eplb
        if (returns or eplb is not None) and has_experts(self.model):
            max_rows = max(self.limits.max_num_batched_tokens, self.limits.max_num_seqs)
            recorder = RoutedExpertsRecorder(self.model, max_rows, platform.device)
            self.routed_experts = recorder if returns else None
            if eplb is not None:
                self.balancer = ExpertBalancer(self.model, recorder, mesh.ep, eplb)

    def _make_adapters(self) -> AdapterStore | None:
        lora, model = self.config.lora, self.model
        if not lora.enable_lora:
            return None
        from penstock.loading.adapters.read import read_adapter  # most engines need none of it
        from penstock.models.vision import VisionModel

        dtype = self.dtypes.compute
        if lora.lora_dtype != "auto":
            dtype = getattr(torch, lora.lora_dtype)
        experts_move = self.config.parallel.enable_eplb
        slots = make_slots(model, lora.max_loras, lora.max_lora_rank, dtype, experts_move)

        def read(adapter: Adapter) -> AdapterWeights:
            return read_adapter(adapter.path, model, lora.max_lora_rank, dtype, adapter.digest)

        tower = model.tower_prefix if isinstance(model, VisionModel) else None
        guests = [
            AdapterStore(guest_slots(slots, lane), lora.max_loras, read, None, lane, (), slots)
            for lane in range(self.mesh.num_lanes)
            if lane != self.mesh.lane
        ]
        return AdapterStore(slots, lora.max_loras, read, tower, self.mesh.lane, guests)

    def start(self, layout: KVCacheLayout, limits: StepLimits) -> None:
        """Allocate the cache and the runner's tables. `limits` fit the size of the cache."""
        link = None
        if self.mesh.pp.size > 1:
            draft_specs = self.drafter.kv_specs() if self.drafter is not None else {}
            layout = layout.of_layers({**self.model.kv_specs(self.dtypes.kv), **draft_specs})
            via_host = self.platform.backend == "gloo"
            link = StageLink(self.mesh.pp, self.platform.device, via_host)
        self.runner = ModelRunner(
            self.model,
            self.model.vocab_size,
            layout,
            self.platform.device,
            limits,
            self.ops.choose_tokens,
            self.processors,
            self.drafter,
            capture_graphs=(
                self.model.can_capture
                and not self.config.device.enforce_eager
                and not self.mesh.spans_replicas  # the host waits for where tokens go
            ),
            dtype=self.dtypes.compute,
            routed_experts=self.routed_experts,
            pooler=self.pooler,
            adapters=self.adapters,
            logprobs_mode=self.config.model.logprobs_mode,
            link=link,
            takes_media=limits.encoder_rows > 0,
            balancer=self.balancer,
        )
        self._steps = StepQueue(self.runner, fails_alone=not self.mesh.spans_replicas)

    def launch(self, plan: StepPlan) -> None:
        """Start a step. See `Executor` for failures."""
        self._steps.launch(plan)
        if not plan.masked:
            self._steps.sample(None)

    def sample(self, masks: StepMasks | None) -> None:
        """Sample the tokens of the last launched step, which is `masked`."""
        self._steps.sample(masks)

    def collect(self) -> StepResult:
        """Return the oldest step's result. One rank of a stage includes those of requests."""
        result = self._steps.collect()
        return result if self.mesh.reports else msgspec.structs.replace(result, results=[])

    def settle(self, step_id: int, settled: dict[str, Settled]) -> None:
        """Take a collected step's tokens, by request, from the last pipeline stage."""
        assert self.runner is not None
        self.runner.settle(step_id, settled)

    def reset(self) -> None:
        """Forget all requests and run steps again. Call it after a failed step."""
        self._steps.reset()

    def start_profile(self, prefix: str | None) -> None:
        """Record all steps from now on. The file's name begins with `prefix`."""
        from penstock.runner.profiler import StepProfiler  # steps need none of it

        settings = self.config.profiler.settings
        assert settings is not None, "the engine refuses it"
        rank = self.mesh.world.rank
        self._profiler = StepProfiler(settings, rank, self.platform.device, prefix)
        self._profiler.start()

    def stop_profile(self) -> None:
        """Write what was recorded."""
        self._profiler.stop()

    @property
    def _computes_logits(self) -> bool:
        return self.pooler is None and self.mesh.is_last_stage

    def capabilities(self) -> Capabilities:
        """What the engine needs to plan the cache and the steps."""
        kv_specs = self.model.kv_specs(self.dtypes.kv)
        draft_specs = self.drafter.kv_specs() if self.drafter is not None else {}
        budget = kv_budget(
            self.config, self.platform, self.model, kv_specs, self.limits, self._computes_logits,
            draft_specs, None if self.mesh.is_first_stage else self.dtypes.compute,
        )  # fmt: skip
        info = self.pooler.info if self.pooler is not None else None
        device = self.platform.device.type
        return Capabilities(
            self.limits,
            self.dtypes.kv,
            kv_specs,
            budget,
            info,
            draft_specs,
            device,
            self.fingerprint,
        )
