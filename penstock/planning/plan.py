"""Decides which splits of a model over GPUs fit, and what each can serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import torch

from penstock.config import EngineConfig
from penstock.config.quantization import find_quantization_config
from penstock.kvcache.layout import blocks_for_request, longest_request, plan_layout
from penstock.loading.source import ModelSource
from penstock.models.runtime import Dtypes, resolve_dtypes, resolve_limits
from penstock.planning.costs import Step, step_seconds
from penstock.planning.hardware import GIB, GPUS, Gpu
from penstock.planning.shapes import RankShape, shape_of
from penstock.platforms.platform import gpu_platform
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.limits import StepLimits

# Bytes of a GPU that are neither weights nor KV cache; measured on an H200.
CONTEXT = int(0.7 * GIB)  # CUDA and its libraries
COLLECTIVES = int(0.5 * GIB)  # NCCL's buffers
FIXED = 2 * GIB  # that the engine keeps for graphs and tables
HIDDEN_COPIES = 3  # of the hidden states, in the largest step
LOGIT_BYTES = 6  # of a logit while tokens are chosen: in 16 and in 32 bits
MOST_RANKS = 64


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
    """A model over `tp` GPUs, `dp` times. Sizes are bytes of one GPU."""

    tp: int
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
    refused: dict[int, str]  # by tp: why the model cannot be split so

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

    def shape(self, tp: int) -> RankShape:
        return shape_of(self.config, self.source, self.dtypes, self.limits.max_model_len, tp)

    def split(self, shape: RankShape, dp: int) -> Split:
        """What one GPU of such a split holds, and what it serves."""
        step_bytes = self.step_bytes(shape)
        cache = self.config.cache
        budget = int(self.gpu.memory * cache.gpu_memory_utilization)
        budget -= shape.weight_bytes + step_bytes
        if cache.kv_cache_memory_bytes is not None:
            budget = min(budget, cache.kv_cache_memory_bytes)
        longest = num_requests = 0
        if budget > 0:
            longest, num_requests = self._capacity(shape, budget)
        speed = None
        if num_requests:
            speed = self.speed(shape, num_requests)
        return Split(
            tp=shape.tp,
            dp=dp,
            weight_bytes=shape.weight_bytes,
            step_bytes=step_bytes,
            kv_bytes=max(budget, 0),
            kv_bytes_per_token=shape.kv_bytes_per_token,
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
        collectives = COLLECTIVES if shape.tp > 1 else 0
        return CONTEXT + FIXED + shape.table_bytes + peak + collectives

    def _capacity(self, shape: RankShape, budget: int) -> tuple[int, int]:
        """The longest request, and how many of the planned length run at once."""
        limits = self.limits
        if not shape.kv_specs:
            return limits.max_model_len, limits.max_num_seqs
        block_size = self.config.cache.block_size
        layout = plan_layout(shape.kv_specs, block_size, limits.max_model_len)
        layout = msgspec.structs.replace(
            layout,
            num_blocks=budget // layout.block_bytes,
            max_step_tokens=limits.max_num_batched_tokens,
        )
        length = self.input_len + self.output_len
        held = blocks_for_request(layout.groups, length, max_step_tokens=layout.max_step_tokens)
        num_requests = min(max(layout.num_blocks - 1, 0) // held, limits.max_num_seqs)
        return longest_request(layout, limits.max_model_len), num_requests

    def speed(self, shape: RankShape, num_requests: int) -> Speed:
        """With so many requests at once, each in another phase of its life."""
        prompt = self.input_len
        size = max(self.limits.max_num_batched_tokens // prompt, 1) * prompt
        whole = Step(num_prompt=size, prompt_context=prompt / 2, num_sampled=size // prompt)
        prompt_token = step_seconds(shape, self.gpu, whole) / size
        alone = Step(num_prompt=prompt, prompt_context=prompt / 2, num_sampled=1)
        context = prompt + self.output_len / 2
        if shape.head is None:  # vectors
            first = step_seconds(shape, self.gpu, alone)
            return Speed(first, 0.0, 0.0, 1 / prompt_token, 0.0)

        def decode(count: int) -> float:
            return step_seconds(shape, self.gpu, Step(count, context, num_sampled=count))

        # In the time of one token of each, this share of the requests is replaced.
        step = decode(num_requests) + num_requests / self.output_len * prompt * prompt_token
        return Speed(
            first_token=step_seconds(shape, self.gpu, alone),
            token=decode(1),
            batch_token=step,
            prompt_rate=1 / prompt_token,
            output_rate=num_requests / step,
        )


def make_plan(planner: Planner, num_gpus: int) -> Plan:
    """Every way to use all GPUs. Raises ConfigError, with what would do, if the model fits none."""
    _require_positive("gpus", num_gpus)
    config, source = planner.config, planner.source
    splits, refused = [], {}
    for tp in _sizes(config, num_gpus):
        try:
            splits.append(planner.split(planner.shape(tp), num_gpus // tp))
        except (ConfigError, ModelError) as error:
            if tp == config.parallel.tensor_parallel_size:  # 1, or the one that was asked for
                raise
            refused[tp] = str(error)
    if not any(own.fits for own in splits):
        raise ConfigError(_does_not_fit(planner, num_gpus, splits))
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


def _sizes(config: EngineConfig, num_gpus: int) -> Iterable[int]:
    """The numbers of ranks that divide the GPUs; the one that was asked for, if one was."""
    if config.parallel.pipeline_parallel_size > 1:
        raise ConfigError("penstock plan leaves out pipeline stages: drop pipeline_parallel_size")
    asked = config.parallel.tensor_parallel_size
    if asked > num_gpus:
        raise ConfigError(
            f"tensor_parallel_size={asked} needs {asked} GPUs, but --gpus is {num_gpus}"
        )
    if asked > 1:
        return [asked]
    return [tp for tp in range(1, min(num_gpus, MOST_RANKS) + 1) if num_gpus % tp == 0]


def _does_not_fit(planner: Planner, num_gpus: int, splits: list[Split]) -> str:
    """What is missing, and what would do."""
    best = max(splits, key=lambda own: own.tp)
    gpu = planner.gpu
    usable = gpu.memory * planner.config.cache.gpu_memory_utilization
    message = (
        f"{planner.source.name} does not fit on {num_gpus} x {gpu.name}: with "
        f"tensor_parallel_size={best.tp}, each needs {best.weight_bytes / GIB:.1f} GiB for weights "
        f"and {best.step_bytes / GIB:.1f} for steps, so that {best.kv_bytes / GIB:.1f} of "
        f"{usable / GIB:.1f} GiB are left for the KV cache of a request of "
        f"{planner.input_len + planner.output_len} tokens"
    )
    remedies = []
    tp = 2 * best.tp
    while tp <= MOST_RANKS:
        try:
            if planner.split(planner.shape(tp), 1).fits:
                remedies.append(f"{tp} x {gpu.name}")
                break
        except (ConfigError, ModelError):
            break  # it cannot be split so far
        tp *= 2
    remedies += [f"{num_gpus} x {other.name}" for other in _larger(planner, best.tp)]
    if not remedies:
        return f"{message}: use a quantized model, or --quantization fp8"
    return f"{message}: it would on {', '.join(remedies)}"


def _larger(planner: Planner, tp: int) -> list[Gpu]:
    """The GPUs on which as many ranks fit, the smallest first."""
    shape = planner.shape(tp)
    found = []
    for gpu in sorted(GPUS.values(), key=lambda own: own.memory_gib):
        if gpu.memory > planner.gpu.memory:
            other = Planner(
                planner.config, planner.source, gpu, planner.input_len, planner.output_len
            )
            if other.split(shape, 1).fits:
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
    yield (
        "Prefix caching, drafts and adapters are left out. A router's choices are assumed to be "
        "spread evenly over its experts."
    )
    yield (
        "Ranks share every layer (tensor parallelism), and engines beside each other share nothing "
        "(data parallelism). Pipeline stages and expert parallelism are left out."
    )
