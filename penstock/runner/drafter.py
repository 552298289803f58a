"""The interface of a drafter, which proposes tokens for the next step to verify."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.loading.gguf.mmproj import NONE
from penstock.loading.source import ModelSource
from penstock.models.base import Hidden, Model
from penstock.platforms.platform import Platform
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import KVCacheSpec
from penstock.protocol.limits import StepLimits
from penstock.protocol.step import NewRequest, StepPlan
from penstock.runner.forward import ForwardInputs
from penstock.runner.graphs import GraphPool
from penstock.runner.kv_memory import KVMemory
from penstock.runner.layout import StepLayout
from penstock.runner.sampler import Sampler
from penstock.runner.tables import IntArray, RequestTables


@dataclass(frozen=True)
class DraftSetup:
    """What a drafter with weights is loaded for. All of it is the target's."""

    target: Model
    config: EngineConfig
    source: ModelSource
    platform: Platform
    mesh: Mesh
    limits: StepLimits

    @property
    def max_rows(self) -> int:
        """The most rows of a step."""
        return max(self.limits.max_num_batched_tokens, self.limits.max_num_seqs)

    @property
    def draft_mesh(self) -> Mesh:
        """The ranks that share the layers of a model that drafts: those of the last stage."""
        settings = self.config.speculative.settings
        is_whole = settings is not None and settings.draft_tensor_parallel_size == 1
        # Replicas draft by themselves: experts of a drafter are not spread over them.
        ep = RankGroup() if self.mesh.spans_replicas else self.mesh.ep
        return Mesh() if is_whole else replace(self.mesh, pp=RankGroup(), ep=ep)

    def config_of(self, name: str, quantization: str | None = None) -> EngineConfig:
        """The configuration of a model that drafts."""
        config = self.config
        model = replace(config.model, model=name, revision=None, mmproj=NONE, hf_overrides=None)
        load = replace(config.load, quantization=quantization, merge_lora=None)
        parallel = replace(
            config.parallel,
            tensor_parallel_size=self.draft_mesh.tp.size,
            pipeline_parallel_size=1,
            nnodes=1,
            node_rank=0,
        )
        media = replace(config.media, language_model_only=True)  # drafters read tokens
        return replace(config, model=model, load=load, parallel=parallel, media=media)

    def check_sizes(self, what: str, head: Model, target_size: int | None = None) -> None:
        """Raise ConfigError unless a head has the target's sizes."""
        size = self.target.hidden_size
        for name, own, theirs in (
            ("vocab_size", head.vocab_size, self.target.vocab_size),
            ("hidden_size", head.hidden_size, size),
            ("target_hidden_size", size if target_size is None else target_size, size),
        ):
            if own != theirs:
                raise ConfigError(
                    f"{what} is for a target with {name} {own}, this one's is {theirs}: choose one "
                    "that was trained for it"
                )


@dataclass(frozen=True)
class DraftStep:
    """The requests that have just sampled. Their tokens are in the tables."""

    tables: RequestTables
    slots: torch.Tensor  # [num_requests]
    host_slots: IntArray  # the same, on the host
    last_rows: torch.Tensor  # [num_requests]: the row of each one's last accepted token
    num_accepted: torch.Tensor  # [num_requests]: accepted drafts of this step
    num_drafts: int  # to propose for each
    least_chance: float = 0.0  # to hold that a draft must have, if known; else it costs too much


@dataclass(frozen=True)
class Drafts:
    token_ids: torch.Tensor | None  # [num_requests, num_drafts], padded with any valid token; None:
    # the drafter wrote them into the tables
    counts: IntArray | None = None  # [num_requests]: drafts without padding; None: all are drafts


class Drafter:
    """Proposes up to `num_drafts` tokens for each request that has just sampled.

    Any proposal is safe: a draft that is not what the request itself would sample is rejected.
    """

    num_drafts: int  # the most that it proposes for a request
    num_lookahead: int = 0  # positions after a step's last one that its layers write
    is_on_host: bool = False  # it waits for the tokens, so steps do not overlap unless asked to
    knows_chances: bool = False  # it heeds `DraftStep.least_chance`

    def choose_layers(self, setup: DraftSetup) -> None:
        """Worker, on every pipeline stage: which of the target's layers it reads (`aux_layers`)."""

    def load(self, setup: DraftSetup) -> None:
        """Worker, on the last pipeline stage: load its weights, if it has any."""

    def kv_specs(self) -> dict[str, KVCacheSpec]:
        """Worker: what its layers keep in the KV cache, by name."""
        return {}

    def start(self, tables: RequestTables, memory: KVMemory, sampler: Sampler) -> None:
        """Runner: what it reads and writes. Requests come later."""

    def use_graphs(self, graphs: GraphPool) -> None:
        """Runner, on a GPU, after `start`: it may capture what it computes."""

    def add(self, slot: int, request: NewRequest) -> None:
        """A request enters a slot, now or again after a preemption."""

    def remove(self, slot: int) -> None:
        """The request leaves its slot."""

    def take_blocks(self, plan: StepPlan) -> None:
        """The plan's requests have their new KV blocks."""

    def observe(self, inputs: ForwardInputs, hidden: Hidden) -> None:
        """A step's rows and their hidden states, before tokens are sampled.

        On a GPU this is captured with the forward pass: a replay runs none of its Python code.
        """

    def sees(self, layout: StepLayout) -> bool:
        """Whether it observes a step: not a decode after which it proposes nothing."""
        is_used = type(self).observe is not Drafter.observe
        return is_used and (layout.num_drafts > 0 or not layout.is_decode)

    def propose(self, step: DraftStep) -> Drafts:
        raise NotImplementedError
