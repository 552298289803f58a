"""Declares every metric once. The Prometheus registries and the docs page are built from this."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

PREFIX = "penstock:"


def steps(first: float, last: float) -> tuple[float, ...]:
    """Bucket bounds from `first` (a power of ten) to `last`: 1, 2, 5, 10, 20, 50, ..."""
    bounds: list[float] = []
    power = round(math.log10(first))
    while True:
        for mantissa in (1, 2, 5):
            bound = float(f"{mantissa}e{power}")
            if bound > last:
                return tuple(bounds)
            bounds.append(bound)
        power += 1


# vLLM's bounds, which panels and alerts on targets select, and below them finer ones.
FIRST_TOKEN_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_SECONDS = (  # between tokens
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
SECONDS = (
    *steps(0.001, 0.2), 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = steps(1, 200_000)
COUNT = steps(1, 200)


@dataclass(frozen=True)
class Declared:
    """A metric, with the labels in `labels`.

    Metrics of the model also have the label `model_name`, and most of them the label `engine`: the
    index of a replica.
    """

    name: str  # without the prefix
    kind: Literal["gauge", "counter", "histogram", "summary"]
    help: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    prefix: str = PREFIX

    @property
    def full_name(self) -> str:
        """The name in Prometheus. A counter ends in ``_total``."""
        return self.prefix + self.name + ("_total" if self.kind == "counter" else "")

    @property
    def sample_names(self) -> list[str]:
        """The names that a query may use."""
        parts = {"histogram": ("bucket", "count", "sum"), "summary": ("count", "sum")}
        if self.kind not in parts:
            return [self.full_name]
        return [f"{self.full_name}_{part}" for part in parts[self.kind]]


OF_ENGINES = (
    # -- the engine's state
    Declared("num_requests_running", "gauge", "Running requests."),
    Declared("num_requests_waiting", "gauge", "Queued requests."),
    Declared(
        "num_requests_waiting_by_reason",
        "gauge",
        "Queued requests, by what they wait for: capacity, or deferred: a grammar, a LoRA adapter "
        "or a retry.",
        labels=("reason",),
    ),
    Declared("kv_cache_usage_perc", "gauge", "KV cache usage, 0 to 1."),
    Declared(
        "cache_config_info",
        "gauge",
        "Always 1; the labels are the KV cache's settings, and its blocks, also on a CPU.",
        labels=("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks"),
    ),
    # -- the engine's work
    Declared("prefix_cache_queries", "counter", "Tokens looked up in the prefix cache."),
    Declared("prefix_cache_hits", "counter", "Tokens served by the prefix cache."),
    Declared(
        "num_preemptions",
        "counter",
        "Preemptions: a running request lost its KV blocks and is recomputed later.",
    ),
    # -- the workers' work: counted in `StepResult.metrics` by rank 0
    Declared("eager_steps", "counter", "Forward passes that ran without a CUDA graph."),
    Declared("graph_steps", "counter", "Forward passes replayed from a CUDA graph."),
    # Of the placements that `enable_eplb` looked at, with their copies sharing the work:
    Declared("expert_tokens_mean", "counter", "Tokens of experts on a rank, on average."),
    Declared("expert_tokens_busiest", "counter", "Tokens of experts on the busiest rank."),
    Declared("expert_moves", "counter", "Experts that were sent to another rank."),
    Declared("iteration_tokens_total", "histogram", "Tokens computed by a step.", TOKENS),
    # -- speculative decoding
    Declared("spec_decode_num_drafts", "counter", "Draft proposals that steps verified."),
    Declared("spec_decode_num_draft_tokens", "counter", "Draft tokens that steps verified."),
    Declared("spec_decode_num_accepted_tokens", "counter", "Draft tokens that were accepted."),
    Declared(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Draft tokens that were accepted, by their place in the proposal, from 0.",
        labels=("position",),
    ),
    # -- LoRA adapters
    Declared(
        "lora_requests_info",
        "gauge",
        "Time of the last change of the labels: the most adapters in a step, and the names of "
        "those of running and of waiting requests, with commas between them.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    Declared("lora_host_adapters", "gauge", "LoRA adapters in host memory."),
    Declared("lora_loads", "counter", "LoRA adapters loaded into host memory."),
    Declared("lora_evictions", "counter", "LoRA adapters dropped from host memory for others."),
    Declared("lora_placements", "counter", "LoRA adapters copied into a device slot."),
    Declared("lora_waits", "counter", "Requests that had to wait for their LoRA adapter."),
    Declared(
        "lora_longest_wait_seconds",
        "gauge",
        "Longest wait of a request for its LoRA adapter since the engine started.",
    ),
    Declared(
        "lora_most_overtakes",
        "gauge",
        "Most later requests with LoRA adapters that were admitted before the first waiting one "
        "since the engine started; at most max_num_seqs.",
    ),
    # -- engine crashes
    Declared("engine_restarts", "counter", "Engine restarts after a crash or hang."),
)
WAITING_REASONS = ("capacity", "deferred")
OF_REQUESTS = (
    # -- tokens
    Declared(
        "prompt_tokens",
        "counter",
        "Prompt tokens, cached ones included; counted at a request's first token.",
    ),
    Declared("prompt_tokens_cached", "counter", "Prompt tokens that the prefix cache served."),
    Declared(
        "prompt_tokens_by_source",
        "counter",
        "Prompt tokens, by source: local_compute or local_cache_hit.",
        labels=("source",),
    ),
    Declared("generation_tokens", "counter", "Generated tokens."),
    Declared("request_prompt_tokens", "histogram", "Prompt tokens of a completed request.", TOKENS),
    Declared(
        "request_generation_tokens",
        "histogram",
        "Generated tokens of a completed request.",
        TOKENS,
    ),
    Declared(
        "request_max_num_generation_tokens",
        "histogram",
        "Generated tokens of the longest completion of a client's request.",
        TOKENS,
    ),
    Declared(
        "request_prefill_kv_computed_tokens",
        "histogram",
        "Prompt tokens of a completed request that the prefix cache did not serve.",
        TOKENS,
    ),
    # -- times
    Declared(
        "time_to_first_token_seconds",
        "histogram",
        "Time to first token (TTFT), from submission to the engine.",
        FIRST_TOKEN_SECONDS,
    ),
    Declared(
        "inter_token_latency_seconds",
        "histogram",
        "Time between successive tokens of a request (ITL).",
        TOKEN_SECONDS,
    ),
    Declared(
        "request_time_per_output_token_seconds",
        "histogram",
        "Mean time per output token after the first (TPOT), per completed request.",
        TOKEN_SECONDS,
    ),
    Declared(
        "e2e_request_latency_seconds",
        "histogram",
        "End-to-end latency of a completed request.",
        SECONDS,
    ),
    Declared(
        "request_queue_time_seconds",
        "histogram",
        "Time in the queue, from submission to the first step.",
        SECONDS,
    ),
    Declared(
        "request_prefill_time_seconds",
        "histogram",
        "Prefill time, from the first step to the first token.",
        SECONDS,
    ),
    Declared(
        "request_decode_time_seconds",
        "histogram",
        "Decode time of a completed request, from the first token to the last.",
        SECONDS,
    ),
    Declared(
        "request_inference_time_seconds",
        "histogram",
        "Prefill time plus decode time of a completed request.",
        SECONDS,
    ),
    # -- requests
    Declared(
        "request_success",
        "counter",
        "Finished requests, by reason: stop, length, abort or error.",
        labels=("finished_reason",),
    ),
    Declared("request_params_n", "histogram", "n of a client's request.", COUNT),
    Declared(
        "request_params_max_tokens",
        "histogram",
        "max_tokens of a client's request, capped by the context.",
        TOKENS,
    ),
)
OF_SERVER = (
    Declared(
        "mm_cache_queries",
        "counter",
        "Images and videos looked up in the cache of processed media.",
    ),
    Declared("mm_cache_hits", "counter", "Images and videos served by this cache."),
    Declared(
        "api_process_restarts",
        "counter",
        "Restarts of API processes that died (--api-server-count).",
    ),
    Declared(
        "requests_replayed",
        "counter",
        "Requests resumed on another engine, after a crash or to empty a replica.",
    ),
    Declared(
        "requests_quarantined",
        "counter",
        "Requests run alone because they may have crashed the engine.",
    ),
    # -- stored responses
    Declared("stored_responses", "gauge", "Stored responses and conversations."),
    Declared(
        "stored_response_bytes", "gauge", "Memory used by stored responses and conversations."
    ),
    # -- tool calls
    Declared(
        "tool_call_parser_invocations",
        "counter",
        "Completions of requests with tools, by mode (streaming, non_streaming), outcome "
        "(tool_call, no_tool_call) and request_type (chat_completions, responses, other).",
        labels=("mode", "outcome", "request_type"),
    ),
)


OF_MODEL = (
    *(replace(item, labels=("engine", *item.labels)) for item in (*OF_ENGINES, *OF_REQUESTS)),
    *OF_SERVER,
)
OF_HTTP = tuple(
    replace(item, prefix="")
    for item in (
        Declared(
            "http_requests",
            "counter",
            "HTTP requests. status is 2xx, 4xx or 5xx, handler the route, or none.",
            labels=("handler", "method", "status"),
        ),
        Declared(
            "http_request_duration_seconds",
            "histogram",
            "Time from a request's headers to the end of its response.",
            SECONDS,
            labels=("handler", "method"),
        ),
        Declared(
            "http_request_size_bytes", "summary", "Size of request bodies.", labels=("handler",)
        ),
        Declared(
            "http_response_size_bytes", "summary", "Size of response bodies.", labels=("handler",)
        ),
    )
)
DECLARED = (*OF_MODEL, *OF_HTTP)
