"""Decides which splits of a model over GPUs fit, and what each can serve."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from penstock.config import EngineConfig
from penstock.config.quantization import find_quantization_config
from penstock.kvcache.layout import blocks_for_request, longest_request, plan_layout
from penstock.loading.source import ModelSource
from penstock.models.runtime import Dtypes, resolve_dtypes, resolve_limits
from penstock.planning.costs import StepLoad, interval_seconds, pass_seconds
from penstock.planning.hardware import GIB, GPUS, PCIE, Gpu
from penstock.planning.shapes import Partition, RankShape, shape_of
from penstock.planning.ways import MOST_RANKS, Way, list_ways
from penstock.platforms.platform import gpu_platform
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.limits import StepLimits

# Bytes of a GPU that are neither weights nor KV cache; measured on an H200.
CONTEXT = int(0.7 * GIB)  # CUDA and its libraries
COLLECTIVES = int(0.5 * GIB)  # NCCL's buffers
FIXED = 2 * GIB  # that the engine keeps for graphs and tables
HIDDEN_COPIES = 3  # of the hidden states, in the largest step
LOGIT_BYTES = 6  # of a logit while tokens are chosen: in 16 and in 32 bits


@dataclass(frozen=True)
class Speed:
    """Of one engine. Times are seconds."""

    first_token: float  # of one prompt alone
    token: float  # of one request alone
    batch_token: float  # of each request when all run at once, prompts of new ones included
    prompt_rate: float  # prompt tokens per second
    output_rate: float  # output tokens per second of all requests

    def in_all(self, num_engines: int) -> tuple[float, float]:
        return self.prompt_rate * num_engines, self.output_rate * num_engines


@dataclass(frozen=True)
class Split:
    """A model over `tp` x `pp` GPUs, `dp` times. Sizes are bytes of one GPU.

    With several stages, they are those of the stage that has the least memory left.
    """

    tp: int
    pp: int
    ep: int  # GPUs that experts are spread over, of all replicas; 1: slices of each expert
    dp: int
    weight_bytes: int
    step_bytes: int  # what the largest step and the engine need besides
    kv_bytes: int  # of the KV cache
    kv_bytes_per_token: int
    longest: int  # tokens of a request, prompt and output together
    num_requests: int  # of the planned lengths that one engine runs at once
    speed: Speed | None  # None: not even one request fits

    @property
    def fits(self) -> bool:
        return self.speed is not None


@dataclass(frozen=True)
class Plan:
    model: str
    architecture: str
    dtype: str
    is_quantized: bool  # weights have fewer bits than `dtype`
    kv_dtype: str
    max_model_len: int
    gpu: Gpu
    num_gpus: int
    input_len: int
    output_len: int
    splits: tuple[Split, ...]
    refused: dict[str, str]  # such as "tp=3": why the model cannot be split so

    @property
    def best(self) -> Split:
        """The split with the highest throughput."""
        return max((own for own in self.splits if own.fits), key=_output_rate)

    @property
    def fastest(self) -> Split:
        """The split with the least time per token of one request."""
        return min((own for own in self.splits if own.fits), key=_token_time)


def _output_rate(split: Split) -> float:
    return split.speed.output_rate * split.dp if split.speed is not None else 0.0


def _token_time(split: Split) -> float:
    return split.speed.token if split.speed is not None else float("inf")


class Planner:
    """One model on one kind of GPU."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        gpu: Gpu,
        input_len: int,
        output_len: int,
    ) -> None:
        _require_positive("input-len", input_len)
        _require_positive("output-len", output_len)
        platform = gpu_platform(torch.device("cuda"), gpu.memory)
        self.config, self.source, self.gpu = config, source, gpu
        self.input_len, self.output_len = input_len, output_len
        self._stages: dict[Partition, tuple[RankShape, ...]] = {}
        self.dtypes: Dtypes = resolve_dtypes(config, source.config, platform)
        self.limits: StepLimits = resolve_limits(config, source.config, platform)
        if input_len + output_len > self.limits.max_model_len:
            raise ConfigError(
                f"requests of {input_len} + {output_len} tokens exceed the model's maximum of "
                f"{self.limits.max_model_len}: lower --input-len or --output-len"
            )

    @property
    def is_quantized(self) -> bool:
        is_stored_so = find_quantization_config(self.source.config) is not None
        return is_stored_so or bool(self.config.load.quantization) or self.source.gguf is not None

    def stages(self, partition: Partition) -> tuple[RankShape, ...]:
        """The first rank of each pipeline stage."""
        if partition not in self._stages:
            self._stages[partition] = tuple(
                shape_of(
                    *(self.config, self.source, self.dtypes, self.limits.max_model_len),
                    *(partition, stage),
                )
                for stage in range(partition.pp)
            )
        return self._stages[partition]

    def split(self, partition: Partition, dp: int) -> Split:
        """What one GPU of such a split holds, and what it serves."""
        stages = self.stages(partition)
        cache = self.config.cache
        budgets = []
        for shape in stages:
            budget = int(self.gpu.memory * cache.gpu_memory_utilization)
            budget -= shape.weight_bytes + self.step_bytes(shape)
            if cache.kv_cache_memory_bytes is not None:
                budget = min(budget, cache.kv_cache_memory_bytes)
            budgets.append(budget)
        longest = num_requests = 0
        if min(budgets) > 0:
            longest, num_requests = self._capacity(stages, budgets)
        speed = None
        if num_requests:
            speed = self.speed(stages, num_requests)
        tightest = stages[budgets.index(min(budgets))]
        return Split(
            tp=partition.tp,
            pp=partition.pp,
            ep=partition.ep,
            dp=dp,
            weight_bytes=tightest.weight_bytes,
            step_bytes=self.step_bytes(tightest),
            kv_bytes=max(min(budgets), 0),
            kv_bytes_per_token=max(shape.kv_bytes_per_token for shape in stages),
            longest=longest,
            num_requests=num_requests,
            speed=speed,
        )

    def step_bytes(self, shape: RankShape) -> int:
        """The context, the engine's own tables, and the largest step."""
        limits = self.limits
        per_token = HIDDEN_COPIES * shape.hidden_size + shape.widest
        layer = limits.max_num_batched_tokens * per_token * shape.element_size
        hidden = 2 * limits.max_num_batched_tokens * shape.hidden_size * shape.element_size
        logits = hidden + limits.max_num_seqs * shape.vocab_rows * shape.tp * LOGIT_BYTES
        peak = max(layer, logits if shape.head is not None else 0)
        collectives = COLLECTIVES if shape.partition != Partition() else 0
        return CONTEXT + FIXED + shape.table_bytes + shape.embeddings_bytes + peak + collectives

    def _capacity(self, stages: Sequence[RankShape], budgets: Sequence[int]) -> tuple[int, int]:
        """The longest request, and how many of the planned length run at once."""
        limits = self.limits
        specs = dict(ChainMap(*(shape.kv_specs for shape in reversed(stages))))
        if not specs:
            return limits.max_model_len, limits.max_num_seqs
        block_size = self.config.cache.block_size
        layout = plan_layout(specs, block_size, limits.max_model_len, num_stages=len(stages))
        shares = [layout.of_layers(shape.kv_specs).block_bytes for shape in stages]
        pairs = zip(budgets, shares, strict=True)
        layout = msgspec.structs.replace(
            layout,
            num_blocks=min(budget // share for budget, share in pairs if share),
            max_step_tokens=limits.max_num_batched_tokens,
        )
        length = self.input_len + self.output_len
        held = blocks_for_request(layout.groups, length, max_step_tokens=layout.max_step_tokens)
        num_requests = min(max(layout.num_blocks - 1, 0) // held, limits.max_num_seqs)
        return longest_request(layout, limits.max_model_len), num_requests

    def speed(self, stages: Sequence[RankShape], num_requests: int) -> Speed:
        """With so many requests at once, each in another phase of its life."""
        gpu, prompt = self.gpu, self.input_len
        size = max(self.limits.max_num_batched_tokens // prompt, 1) * prompt
        whole = StepLoad(num_prompt=size, prompt_context=prompt / 2, num_sampled=size // prompt)
        prompt_token = interval_seconds(stages, gpu, whole) / size
        alone = StepLoad(num_prompt=prompt, prompt_context=prompt / 2, num_sampled=1, is_alone=True)
        first = pass_seconds(stages, gpu, alone)
        if stages[-1].head is None:  # vectors
            return Speed(first, 0.0, 0.0, 1 / prompt_token, 0.0)
        context = prompt + self.output_len / 2
        one = StepLoad(1, context, num_sampled=1, is_alone=True)
        # Requests are divided among as many steps as there are stages.
        count = -(-num_requests // len(stages))
        part = StepLoad(count, context, num_sampled=count)
        decode = pass_seconds(stages, gpu, part)
        if num_requests > len(stages):
            decode = max(decode, len(stages) * interval_seconds(stages, gpu, part))
        # In the time of one token of each, this share of the requests is replaced.
        step = decode + num_requests / self.output_len * prompt * prompt_token
        return Speed(
            first_token=first,
            token=pass_seconds(stages, gpu, one),
            batch_token=step,
            prompt_rate=1 / prompt_token,
            output_rate=num_requests / step,
        )


def make_plan(planner: Planner, num_gpus: int) -> Plan:
    """Every way to use all GPUs. Raises ConfigError, with what would do, if the model fits none."""
    _require_positive("gpus", num_gpus)
    source, parallel = planner.source, planner.config.parallel
    errors: dict[str, ConfigError | ModelError] = {}
    splits: list[Split] = []

    def try_ways(with_stages: bool) -> None:
        for partition, dp in list_ways(parallel, num_gpus, has_experts(planner), with_stages):
            if (partition, dp) in tried:
                continue
            tried.append((partition, dp))
            try:
                splits.append(planner.split(partition, dp))
            except (ConfigError, ModelError) as error:
                errors[str(partition)] = error

    tried: list[Way] = []
    is_apart = num_gpus > planner.gpu.per_node
    try_ways(with_stages=is_apart or planner.gpu.link <= PCIE)
    if parallel.pipeline_parallel_size == 1 and not any(own.fits for own in splits):
        try_ways(with_stages=True)
    if not splits:
        raise next(iter(errors.values()))
    if not any(own.fits for own in splits):
        raise ConfigError(_does_not_fit(planner, num_gpus, splits))
    splits.sort(key=lambda own: (own.tp, own.pp, own.ep))
    refused = {name: str(error) for name, error in errors.items()}
    architectures = source.config.get("architectures") or ["?"]
    return Plan(
        model=source.name,
        architecture=str(architectures[0]),
        dtype=str(planner.dtypes.compute).removeprefix("torch."),
        is_quantized=planner.is_quantized,
        kv_dtype=planner.dtypes.kv,
        max_model_len=planner.limits.max_model_len,
        gpu=planner.gpu,
        num_gpus=num_gpus,
        input_len=planner.input_len,
        output_len=planner.output_len,
        splits=tuple(splits),
        refused=refused,
    )


def _require_positive(option: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"--{option} must be at least 1, got {value}")


def has_experts(planner: Planner) -> bool:
    """Whether the model has routed experts. Raises its error if it cannot be built at all."""
    return bool(planner.stages(Partition())[0].experts)


def _does_not_fit(planner: Planner, num_gpus: int, splits: list[Split]) -> str:
    """What is missing, and what would do."""
    best = min(splits, key=lambda own: own.weight_bytes)
    gpu = planner.gpu
    usable = gpu.memory * planner.config.cache.gpu_memory_utilization
    message = (
        f"{planner.source.name} does not fit on {num_gpus} x {gpu.name}: with "
        f"{_partition(best)}, each needs {best.weight_bytes / GIB:.1f} GiB for weights "
        f"and {best.step_bytes / GIB:.1f} for steps, so that {best.kv_bytes / GIB:.1f} of "
        f"{usable / GIB:.1f} GiB are left for the KV cache of a request of "
        f"{planner.input_len + planner.output_len} tokens"
    )
    remedies: list[str] = []
    size = 2 * num_gpus
    while size <= MOST_RANKS and not remedies:
        if any(
            _fits(planner, own) for own in (Partition(size), Partition(best.tp, size // best.tp))
        ):
            remedies.append(f"{size} x {gpu.name}")
        size *= 2
    remedies += [f"{num_gpus} x {other.name}" for other in _larger(planner, _partition(best))]
    if not remedies:
        return f"{message}: use a quantized model, or --quantization fp8"
    return f"{message}: it would on {', '.join(remedies)}"


def _partition(split: Split) -> Partition:
    return Partition(split.tp, split.pp, split.ep)


def _fits(planner: Planner, partition: Partition) -> bool:
    try:
        return planner.split(partition, 1).fits
    except (ConfigError, ModelError):
        return False  # the model cannot be split so


def _larger(planner: Planner, partition: Partition) -> list[Gpu]:
    """The GPUs on which as many ranks fit, the smallest first."""
    found = []
    for gpu in sorted(GPUS.values(), key=lambda own: own.memory_gib):
        if gpu.memory > planner.gpu.memory:
            other = Planner(
                planner.config, planner.source, gpu, planner.input_len, planner.output_len
            )
            if other.split(partition, 1).fits:
                found.append(gpu)
    return found[:3]


def as_document(plan: Plan) -> dict[str, object]:
    """For JSON, with what each split gives in all."""
    document = dataclasses.asdict(plan)
    for own, split in zip(document["splits"], plan.splits, strict=True):
        own["fits"] = split.fits
        if split.speed is not None:
            prompts, outputs = split.speed.in_all(split.dp)
            own["total"] = {"prompt_rate": prompts, "output_rate": outputs}
    document["assumptions"] = list(assumptions(plan))
    return document


def assumptions(plan: Plan) -> Iterable[str]:
    """What the numbers rest on."""
    yield (
        "Speeds come from a cost model: bytes and FLOPs at shares of the data sheet's rates, and a "
        "latency for each kernel, fitted to Qwen3 models on one H200 (docs/scaling.md)."
    )
    if plan.gpu.name != "h200":
        yield f"Nothing was measured on {plan.gpu.name}: the same shares and latencies are assumed."
    if plan.is_quantized:
        yield (
            "Speeds of quantized weights are those of 16-bit weights with fewer bytes. Prompts and "
            "large batches may be faster (fp8) or slower (4 bits) than that."
        )
    if any(own.tp > 1 for own in plan.splits):
        yield (
            "Several ranks were not measured. Sums over ranks are assumed to move "
            f"{plan.gpu.link:g} GB/s, and to take 4 us each over peer memory, 12 us with NCCL."
        )
    if plan.num_gpus > plan.gpu.per_node:
        yield (
            "Tensor-parallel ranks and stages that do not fit on one node are assumed to move all "
            "bytes at the rate of the network, and experts their share of tokens."
        )
    if any(_partition(own).is_eager for own in plan.splits):
        yield (
            "Engines whose experts are spread over replicas run without CUDA graphs: launching a "
            "kernel is assumed to take 8 us."
        )
    yield (
        "Prefix caching, drafts and what adapters and images cost in time are left out, and the "
        "memory of drafts. A router's choices are assumed to be spread evenly over its experts."
    )
