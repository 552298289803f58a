"""Declares every metric once. The Prometheus registry and the docs page are built from this."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric as Family

PREFIX = "penstock:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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


SECONDS = steps(0.001, 2000)
TOKEN_SECONDS = steps(0.001, 50)  # between tokens
TOKENS = steps(1, 200_000)
COUNT = steps(1, 200)


@dataclass(frozen=True)
class Declared:
    """A metric. It has the label `model_name` and the ones in `labels`.

    Metrics of an engine also have the label `engine`: the index of its replica.
    """

    name: str  # without the prefix
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name in Prometheus. A counter ends in ``_total``."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")

    @property
    def sample_names(self) -> list[str]:
        """The names that a query may use."""
        if self.kind != "histogram":
            return [self.full_name]
        return [f"{self.full_name}_{part}" for part in ("bucket", "count", "sum")]


OF_ENGINES = (
    # -- the engine's state
    Declared("num_requests_running", "gauge", "Running requests."),
    Declared("num_requests_waiting", "gauge", "Queued requests."),
    Declared("kv_cache_usage_perc", "gauge", "KV cache usage, 0 to 1."),
    Declared(
        "cache_config_info",
        "gauge",
        "Always 1; the labels are the KV cache's settings.",
        labels=("block_size", "cache_dtype", "enable_prefix_caching", "num_blocks"),
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
OF_SERVER = (
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
    # -- tokens
    Declared(
        "prompt_tokens",
        "counter",
        "Prompt tokens, cached ones included; counted at a request's first token.",
    ),
    Declared("generation_tokens", "counter", "Generated tokens."),
    Declared("request_prompt_tokens", "histogram", "Prompt tokens of a completed request.", TOKENS),
    Declared(
        "request_generation_tokens",
        "histogram",
        "Generated tokens of a completed request.",
        TOKENS,
    ),
    # -- times
    Declared(
        "time_to_first_token_seconds",
        "histogram",
        "Time to first token (TTFT), from submission to the engine.",
        SECONDS,
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


DECLARED = (
    *(replace(item, labels=("engine", *item.labels)) for item in OF_ENGINES),
    *OF_SERVER,
)


class Histogram(prometheus_client.Histogram):
    """A histogram that can count the tokens of a whole step at once.

    It uses private attributes of the library, so the library's version is bounded.
    """

    def observe_many(self, amount: float, count: int) -> None:
        """Same as calling `observe(amount)` `count` times."""
        self._sum.inc(amount * count)
        self._buckets[bisect.bisect_left(self._upper_bounds, amount)].inc(count)


Instrument = TypeVar("Instrument", Gauge, Counter, Histogram)


class Metrics:
    """The declared metrics of one model, in their own registry."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._shown: dict[tuple[str, str], dict[str, str]] = {}  # labels, by metric and engine
        self._instruments = {item.name: self._make(item) for item in DECLARED}
        # Metrics without extra labels are shown from the start. They are looked up often.
        self._plain = {
            item.name: self._instruments[item.name].labels(model_name=model_name)
            for item in DECLARED
            if not item.labels
        }

    def gauge(self, name: str, **labels: str) -> Gauge:
        return self._find(Gauge, name, labels)

    def counter(self, name: str, **labels: str) -> Counter:
        return self._find(Counter, name, labels)

    def histogram(self, name: str, **labels: str) -> Histogram:
        return self._find(Histogram, name, labels)

    def show_info(self, name: str, value: float, engine: str, **labels: str) -> None:
        """Set an engine's gauge whose labels are the information, in place of its earlier ones."""
        self._forget_info(name, engine)
        self._shown[name, engine] = labels
        self.gauge(name, engine=engine, **labels).set(value)

    def forget_engine(self, engine: str) -> None:
        """Drop the gauges of an engine that is gone. Its counters stay."""
        for item in OF_ENGINES:
            if item.kind == "gauge" and not item.labels:
                self._instruments[item.name].remove(self._model_name, engine)
        for name, other in list(self._shown):
            if other == engine:
                self._forget_info(name, engine)

    def _forget_info(self, name: str, engine: str) -> None:
        labels = self._shown.pop((name, engine), None)
        if labels is not None:
            (declared,) = (item for item in OF_ENGINES if item.name == name)
            values = [labels[label] for label in declared.labels]
            self._instruments[name].remove(self._model_name, engine, *values)

    def render(self) -> bytes:
        """Render in Prometheus's text format, which has the type `CONTENT_TYPE`."""
        return generate_latest(self)

    def collect(self) -> Iterator[Family]:
        """Collect without the `_created` samples that the library adds."""
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family

    def _make(self, item: Declared) -> Gauge | Counter | Histogram:
        name, labels = PREFIX + item.name, ("model_name", *item.labels)
        if item.kind == "gauge":
            return Gauge(name, item.help, labels, registry=self._registry)
        if item.kind == "counter":
            return Counter(name, item.help, labels, registry=self._registry)
        return Histogram(name, item.help, labels, registry=self._registry, buckets=item.buckets)

    def _find(self, kind: type[Instrument], name: str, labels: dict[str, str]) -> Instrument:
        instrument = self._instruments[name] if labels else self._plain[name]
        assert isinstance(instrument, kind), f"{name} is not a {kind.__name__}"
        return instrument.labels(model_name=self._model_name, **labels) if labels else instrument
