"""`ModelRunner` does one device's work: tables, batch, forward pass, head. It sees no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.config.model import LogprobsMode
from penstock.distributed.stage_link import EarlierStageFailed, StageLink, States
from penstock.layers.expert_share import expert_layers
from penstock.models.base import Hidden, Model
from penstock.protocol.kv import KVCacheLayout
from penstock.protocol.limits import StepLimits
from penstock.protocol.media import MediaJob
from penstock.protocol.step import (
    Job,
    NewRequest,
    RequestResult,
    Settled,
    StepFailure,
    StepMasks,
    StepPlan,
    StepResult,
)
from penstock.runner.adapters import AdapterStore
from penstock.runner.drafter import Drafter
from penstock.runner.expert_balance import ExpertBalancer
from penstock.runner.forward import HostSteps, StepBatch, Steps
from penstock.runner.generation import GenerationHead
from penstock.runner.graphs import GraphPool
from penstock.runner.hand_over import HandOver
from penstock.runner.kv_memory import KVMemory
from penstock.runner.layout import StepLayout, lay_out
from penstock.runner.logits_processors import LogitsProcessor
from penstock.runner.routed_experts import RoutedExpertsRecorder
from penstock.runner.sampler import ChooseTokens, Sampler
from penstock.runner.tables import RequestTables

if TYPE_CHECKING:
    from penstock.models.pooler import Pooler
    from penstock.runner.media import MediaStore


@dataclass
class StepHandle:
    """A step in flight: launched, then sampled, then collected."""

    step_id: int
    batch: StepBatch | None  # None if the step computes nothing
    pending: Any = None  # what the head still has to finish
    output: Any = None  # the head's results, being copied to the host
    done: torch.cuda.Event | None = None  # on a GPU: recorded behind the copies to the host
    routed_experts: torch.Tensor | None = None  # [num_tokens, layers, top_k], on the host


class Head(Protocol):
    """What follows the last layer: `GenerationHead`, `PoolingHead`, or `HandOver`."""

    def add(self, slot: int, request: NewRequest) -> None: ...
    def remove(self, slot: int) -> None: ...
    def begin(self, hidden: Hidden, batch: StepBatch, logits: torch.Tensor | None) -> Any: ...
    def finish(self, pending: Any, batch: StepBatch, masks: StepMasks | None) -> Any: ...
    def results(self, output: Any, layout: StepLayout) -> list[RequestResult]: ...


class ModelRunner:
    """Runs the steps it is given, in order.

    `launch` ends at the logits. `sample` chooses tokens and writes them into the tables, so the
    next launch can follow at once. `collect` waits for the results.
    """

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        layout: KVCacheLayout,
        device: torch.device,
        limits: StepLimits,
        choose_tokens: ChooseTokens,
        processors: Sequence[LogitsProcessor] = (),
        drafter: Drafter | None = None,
        capture_graphs: bool = False,
        dtype: torch.dtype = torch.float32,
        routed_experts: RoutedExpertsRecorder | None = None,
        pooler: Pooler | None = None,
        adapters: AdapterStore | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        link: StageLink | None = None,
        takes_media: bool = False,
        balancer: ExpertBalancer | None = None,
    ) -> None:
        self.model = model
        self.balancer = balancer
        self.link = link
        is_last = link is None or link.is_last
        computes_logits = pooler is None and is_last
        keeps_drafts = not is_last and layout.is_recurrent
        self.drafter = drafter
        self.routed_experts = routed_experts
        self.adapters = adapters
        num_adapter_slots = adapters.num_slots if adapters is not None else 0
        self.memory = KVMemory(layout, device)
        seqs, length = limits.max_num_seqs, limits.max_model_len
        sizes = (seqs, length, layout.groups, device, limits.num_drafts)
        self.tables: RequestTables
        self.steps: Steps
        if device.type == "cuda":
            from penstock.runner.device_steps import DeviceSteps  # needs Triton
            from penstock.runner.device_tables import DeviceTables
            from penstock.runner.sampling_graphs import SamplingGraphs

            self.tables = DeviceTables(*sizes)
            self.media = _make_media(
                model, self.tables, dtype, capture_graphs, takes_media, num_adapter_slots
            )
            self.steps = steps = DeviceSteps(
                model, vocab_size, self.tables, self.memory,
                limits.max_num_batched_tokens, limits.num_drafts, capture_graphs, dtype,
                has_logits=computes_logits, adapters=adapters, drafter=drafter, media=self.media,
                keeps_drafts=keeps_drafts,
            )  # fmt: skip
        else:
            self.tables = RequestTables(*sizes)
            self.media = _make_media(
                model, self.tables, dtype, capture_graphs, takes_media, num_adapter_slots
            )
            self.steps = HostSteps(
                model, self.tables, self.memory, num_adapter_slots, drafter, self.media,
                keeps_drafts,
            )  # fmt: skip
        self.head: Head
        if link is not None and not link.is_last:
            self.head = hand_over = HandOver(link, self.tables)
            if layout.is_recurrent:
                hand_over.replay = self.steps.replay
            return
        if pooler is not None:
            from penstock.runner.pooling import PoolingHead  # language models need none of it

            self.memory.second_segments = self.tables.mark_segments()
            self.head = PoolingHead(pooler, self.tables)
            return
        sampler = Sampler(
            self.tables, vocab_size, device, choose_tokens, processors, logprobs_mode,
            model.vocab_shard,
        )  # fmt: skip
        self.head = head = GenerationHead(
            model, self.tables, sampler, drafter, reports_drafts=link is not None
        )
        if layout.is_recurrent:
            head.replay = self.steps.replay
        if drafter is not None:
            drafter.start(self.tables, self.memory, sampler)
            if device.type == "cuda":
                drafter.use_graphs(GraphPool(capture_graphs))
        if device.type == "cuda":
            head.graphs = SamplingGraphs(
                steps.buffers, steps.logits, self.tables, sampler, steps.pool
            )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Update the tables from the plan and compute its tokens."""
        handed = self._receive(plan)
        if self.balancer is not None and (plan.scheduled or plan.joins):
            self.balancer.begin_step()
        self._apply(plan)
        if not plan.scheduled:
            if plan.joins:
                for layer in expert_layers(self.model):
                    layer.join()
            return StepHandle(plan.step_id, None)
        batch, hidden, logits = self.steps.run(lay_out(plan, self.tables), handed)
        handle = StepHandle(plan.step_id, batch, self.head.begin(hidden, batch, logits))
        if self.routed_experts is not None:
            handle.routed_experts = self.routed_experts.take(batch.layout.num_rows)
        if self.balancer is not None:
            self.balancer.count(batch.layout.num_rows)
        return handle

    @torch.inference_mode()
    def sample(self, handle: StepHandle, masks: StepMasks | None = None) -> None:
        """Choose tokens among those that `masks` allow."""
        if handle.batch is not None:
            handle.output = self.head.finish(handle.pending, handle.batch, masks)
            handle.pending = None  # free the logits, which are large
            if self.tables.device.type == "cuda":
                handle.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                handle.done.record()

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for the step and bring its results to the host."""
        finished = self.adapters.take_finished() if self.adapters is not None else []
        if handle.batch is None:
            return StepResult(step_id=handle.step_id, finished_jobs=finished)
        if handle.done is not None:
            handle.done.synchronize()
        results = self.head.results(handle.output, handle.batch.layout)
        if isinstance(self.head, HandOver):
            self.head.expect(handle.step_id, handle.batch)
        if self.routed_experts is not None and handle.routed_experts is not None:
            results = self.routed_experts.attach(
                results, handle.batch.layout, handle.routed_experts
            )
        metrics = dict(self.steps.metrics)
        self.steps.metrics.clear()
        if self.balancer is not None:
            metrics |= self.balancer.metrics
            self.balancer.metrics.clear()
        return StepResult(
            step_id=handle.step_id, results=results, metrics=metrics, finished_jobs=finished
        )

    def run_jobs(self, jobs: Sequence[Job]) -> None:
        """Run a plan's jobs with adapters, which count even if its step is skipped or fails."""
        adapters = [job for job in jobs if not isinstance(job, MediaJob)]
        if adapters:
            assert self.adapters is not None, "jobs need enable_lora"
            self.adapters.run(adapters)

    def _run_media(self, jobs: Sequence[Job]) -> None:
        media = [job for job in jobs if isinstance(job, MediaJob)]
        if media:
            assert self.media is not None, "the frontend refuses media"
            self.media.run(media)

    def _receive(self, plan: StepPlan) -> States | None:
        """What the pipeline stage before this one hands on. First, because it must be taken."""
        if self.link is None or not plan.scheduled:
            return None
        try:
            return self.link.receive()
        except EarlierStageFailed:
            self.run_jobs(plan.jobs)
            raise

    def skip(self, plan: StepPlan) -> None:
        """Do what even a skipped step must do: run its jobs, and take what was handed on."""
        try:
            self._receive(plan)
        except EarlierStageFailed:
            return
        self.run_jobs(plan.jobs)

    def hand_on_failure(self, plan: StepPlan, failure: StepFailure) -> None:
        """Tell the next pipeline stage that `launch` failed or was skipped."""
        if self.link is not None and plan.scheduled:
            self.link.send_failure(failure)

    @torch.inference_mode()
    def settle(self, step_id: int, settled: Mapping[str, Settled]) -> None:
        """Take the tokens of a collected step, by request, from the last pipeline stage."""
        if isinstance(self.head, HandOver):
            self.head.settle(step_id, settled)

    def reset(self) -> None:
        """Forget every request and all embeddings of media. Adapters stay."""
        if self.media is not None:
            self.media.clear()
        self._release(self.tables.request_ids)
        if isinstance(self.head, HandOver):
            self.head.reset()

    def _release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            slot = self.tables.release(request_id)
            if slot is not None:
                self.head.remove(slot)
                if self.media is not None:
                    self.media.remove(slot)

    def _apply(self, plan: StepPlan) -> None:
        self._release(plan.released_ids)
        if plan.jobs:
            self.run_jobs(plan.jobs)
            self._run_media(plan.jobs)
        for request in plan.new_requests:
            slot = self.tables.add(request)
            self.head.add(slot, request)
            if self.media is not None:
                self.media.add(slot, request)
        self.tables.append_blocks(plan.scheduled)
        if self.drafter is not None:
            self.drafter.take_blocks(plan)


def _make_media(
    model: Model,
    tables: RequestTables,
    dtype: torch.dtype,
    capture_graphs: bool,
    takes_media: bool,
    num_adapter_slots: int,
) -> MediaStore | None:
    if not takes_media:
        return None
    from penstock.models.vision import VisionModel  # other models need none of it
    from penstock.runner.media import MediaStore
    from penstock.runner.media_encoder import MediaEncoder

    assert isinstance(model, VisionModel)
    encoder = None
    if model.has_tower:
        encoder = MediaEncoder(model, tables.device, dtype, capture_graphs)
    return MediaStore(model, tables, encoder, num_adapter_slots)
