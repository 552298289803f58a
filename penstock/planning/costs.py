"""How long a step takes: bytes and FLOPs at the rates of a GPU, and a latency for each kernel.

The constants were fitted to an H200 (docs/benchmarks.md, docs/gpu.md, Qwen3 models in 16 bits). On
another GPU, the shares of its peak rates and the latencies are assumed to be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.planning.hardware import Gpu
from penstock.planning.shapes import RankShape

# Shares of the data sheet's rates.
WEIGHTS = 0.93  # of the bandwidth: matmuls of few rows
CACHE = 0.855  # of the bandwidth: keys and values, norms, activations
MATMUL = 0.71  # of the FLOPs
PROMPT = 0.38  # of the FLOPs: attention of prompts
# Seconds.
ONE_ROW = 3.1e-6  # of a matmul beyond its bytes, for one row
MATMUL_LATENCY = 5.6e-6  # for more rows
SMALL, SMALL_ROWS = 1.4e-6, 2.8e-6  # a norm, an activation, rotary: of one row, of more
ATTENTION = 3.6e-6
STEP = 0.03e-3  # inputs, and sampling beyond the logits' bytes
# A sum over ranks, beyond its bytes; assumed. The kernel's 3.1 us were measured without a link.
PEER_SUM = 4e-6  # over peer memory
SUM = 12e-6  # with NCCL, or another exchange
LAUNCH = 8e-6  # of a kernel by the host, without CUDA graphs; assumed

SMALL_KERNELS = 4  # per layer, experts aside
EXPERT_KERNELS = 12  # per layer with experts that are spread over replicas
LOGIT_PASSES = 3  # times that logits are read or written
NORM_PASSES = 8  # times that a layer's norms read or write the hidden states


@dataclass(frozen=True)
class StepLoad:
    """The tokens of a step, and how many cached tokens they attend to."""

    num_decodes: int = 0
    context: float = 0.0  # of a decode, on average
    num_prompt: int = 0
    prompt_context: float = 0.0  # tokens that a prompt's token attends to, on average
    num_sampled: int = 0
    is_alone: bool = False  # no other replica that experts are shared with has tokens


def pass_seconds(stages: Sequence[RankShape], gpu: Gpu, step: StepLoad) -> float:
    """A step through all pipeline stages. Between two, hidden states and residuals are sent."""
    shape, rows = stages[0], step.num_decodes + step.num_prompt
    num_bytes = 2 * rows * shape.hidden_size * shape.element_size / shape.tp
    hop = SUM + num_bytes / gpu.rate(shape.tp * len(stages))
    return sum(step_seconds(own, gpu, step) for own in stages) + (len(stages) - 1) * hop


def interval_seconds(stages: Sequence[RankShape], gpu: Gpu, step: StepLoad) -> float:
    """Between two steps, if all stages have one: the time of the slowest."""
    return max(step_seconds(own, gpu, step) for own in stages)


def step_seconds(shape: RankShape, gpu: Gpu, step: StepLoad) -> float:
    """On one rank, with its stage's layers."""
    bandwidth, flops = gpu.bandwidth * 1e12, gpu.flops * 1e12
    rows = step.num_decodes + step.num_prompt
    latency = ONE_ROW if rows == 1 else MATMUL_LATENCY
    small = SMALL if rows == 1 else SMALL_ROWS

    def matmul(num_bytes: float, num_weights: float, num_rows: float) -> float:
        reading = num_bytes / (WEIGHTS * bandwidth)
        return max(reading, 2 * num_weights * num_rows / (MATMUL * flops))

    seconds, written = STEP, 0.0
    for own in shape.matrices:
        seconds += latency + matmul(own.num_bytes, own.num_weights, rows)
        written += 1.5 * own.width
    if shape.head is not None and step.num_sampled:
        head = shape.head
        seconds += latency + matmul(head.num_bytes, head.num_weights, step.num_sampled)
        logits = step.num_sampled * shape.vocab_rows * shape.element_size
        seconds += LOGIT_PASSES * logits / (CACHE * bandwidth)
    lanes = shape.partition.num_lanes
    routed_rows = rows if step.is_alone else rows * lanes
    for layer in shape.experts:
        reached = layer.num_own * (1 - (1 - layer.top_k / layer.num_experts) ** routed_rows)
        # One kernel routes, two multiply. Blocks of one expert's rows are too small to read the
        # next weights behind the computation.
        seconds += small + 2 * latency + reached * layer.num_bytes / (WEIGHTS * bandwidth)
        chosen = layer.top_k * layer.num_own / layer.num_experts  # experts here, of a token
        seconds += 2 * layer.num_weights * chosen * routed_rows / (MATMUL * flops)
        if lanes > 1:
            seconds += _exchange_seconds(shape, gpu, rows, layer.top_k)
        written += layer.top_k * (layer.width + 2 * shape.hidden_size)
    written += NORM_PASSES * shape.hidden_size * shape.num_layers
    seconds += shape.num_layers * (SMALL_KERNELS * small + ATTENTION)
    seconds += rows * written * shape.element_size / (CACHE * bandwidth)
    seconds += _attention_seconds(shape, bandwidth, flops, step)
    if shape.tp > 1:
        num_bytes = rows * shape.hidden_size * shape.element_size
        seconds += shape.num_sums * _sum_seconds(num_bytes, shape.tp, gpu)
    if shape.partition.is_eager:
        num_kernels = len(shape.matrices) + shape.num_layers * (SMALL_KERNELS + 1)
        num_kernels += EXPERT_KERNELS * len(shape.experts)
        seconds = max(seconds, STEP + LAUNCH * num_kernels)
    return seconds


def _exchange_seconds(shape: RankShape, gpu: Gpu, rows: int, top_k: int) -> float:
    """Of a replica's tokens to experts on the ranks of all replicas, and back."""
    num_ranks = shape.tp * shape.partition.num_lanes
    own = rows / shape.tp * shape.hidden_size * shape.element_size
    if shape.gathers_tokens:
        return 2 * (SUM + gpu.gather_seconds(own, num_ranks))
    return 2 * (SUM + gpu.exchange_seconds(top_k * own, num_ranks))


def _sum_seconds(num_bytes: float, tp: int, gpu: Gpu) -> float:
    """Of a tensor over `tp` ranks: each reads all others, or NCCL moves less and begins later."""
    once = (tp - 1) * num_bytes / gpu.rate(tp)
    nccl = SUM + 2 / tp * once
    return nccl if tp > gpu.per_node else min(PEER_SUM + once, nccl)


def _attention_seconds(shape: RankShape, bandwidth: float, flops: float, step: StepLoad) -> float:
    num_bytes, per_token = 0.0, shape.kv_bytes_per_token
    pairs = 0.0
    for own in shape.attention:
        reach = float("inf") if own.window is None else own.window
        num_bytes += min(step.context, reach) * per_token / len(shape.attention)
        pairs += min(step.prompt_context, reach) * own.dim
    reading = step.num_decodes * (num_bytes + 2 * shape.state_bytes) / (CACHE * bandwidth)
    return reading + 2 * step.num_prompt * pairs / (PROMPT * flops)
