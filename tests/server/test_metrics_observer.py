"""What an observer of engines makes of their reports, in metrics and in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from metric_samples import parse
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import EngineConfig, ServerConfig
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.metrics_observer import MetricsObserver
from penstock.engine.observer import RequestRecord
from penstock.observability.declared import PREFIX
from penstock.observability.metrics import Metrics
from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import ConfigError
from penstock.protocol.limits import StepLimits
from penstock.protocol.pooling import PoolingParams
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams
from penstock.scheduler.stats import AdapterStats, SchedulerStats
from penstock.server.operations.metrics import ServerMetrics, router
from penstock.server.operations.throughput import ThroughputLog
from penstock.server.responses.store import memory_store

INFO = EngineInfo(
    StepLimits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64), num_kv_blocks=7
)


def test_the_prefix_can_be_vllms() -> None:
    config = EngineConfig.from_options({"metrics_prefix": "vllm:"})
    observer = MetricsObserver(config, "m")
    observer.on_ready(0, INFO)
    text = observer.metrics.render().decode()
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in text
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 0.0' in text
    assert PREFIX not in text
    with pytest.raises(ConfigError, match=r"metrics_prefix must be letters, .*, got '9 lives'"):
        EngineConfig.from_options({"metrics_prefix": "9 lives"})


def stats(**changes: Any) -> EngineStats:
    values: dict[str, Any] = dict.fromkeys(SchedulerStats.__dataclass_fields__, 0)
    return EngineStats(scheduler=SchedulerStats(**(values | changes)), step_tokens=[3, 30])


def test_gauges_show_the_latest_state() -> None:
    observer = MetricsObserver(EngineConfig(), "m")
    observer.on_stats(0, stats(num_running=3, num_waiting=2, kv_cache_usage=0.5))
    observer.on_stats(0, stats(num_running=4, num_waiting=1, kv_cache_usage=0.25))
    samples = parse(observer.metrics.render().decode())
    assert samples["num_requests_running"] == 4
    assert samples["num_requests_waiting"] == 1
    assert samples["kv_cache_usage_perc"] == 0.25
    assert samples["iteration_tokens_total_sum"] == 66


def test_adapters_are_shown_by_name_and_counted_over_restarts() -> None:
    def adapters(**changes: Any) -> EngineStats:
        values: dict[str, Any] = dict.fromkeys(AdapterStats.__dataclass_fields__, 0)
        values |= {"max_loras": 2, "running": [], "waiting": [], **changes}
        return msgspec.structs.replace(stats(), adapters=AdapterStats(**values))

    observer = MetricsObserver(EngineConfig(), "m")
    observer.on_stats(0, adapters(running=["a", "b"], waiting=["c"], num_loads=3, num_waits=1))
    observer.on_stats(0, adapters(running=["c"], num_loads=4, num_waits=1, num_evictions=1))
    observer.on_ready(0, INFO)
    observer.on_stats(0, adapters(num_loads=2, num_copies=2))
    text = observer.metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (info,) = families[f"{PREFIX}lora_requests_info"].samples
    assert info.labels == {
        "model_name": "m",
        "engine": "0",
        "max_lora": "2",
        "running_lora_adapters": "",
        "waiting_lora_adapters": "",
    }
    samples = parse(text)
    assert samples["lora_loads_total"] == 6
    assert samples["lora_evictions_total"] == samples["lora_waits_total"] == 1
    assert samples["lora_host_adapters"] == 2


def test_the_names_of_running_and_waiting_adapters_are_labels() -> None:
    observer = MetricsObserver(EngineConfig(), "m")
    values: dict[str, Any] = dict.fromkeys(AdapterStats.__dataclass_fields__, 0)
    values |= {"max_loras": 2, "running": ["a", "b"], "waiting": ["c"]}
    observer.on_stats(0, msgspec.structs.replace(stats(), adapters=AdapterStats(**values)))
    text = observer.metrics.render().decode()
    assert 'running_lora_adapters="a,b"' in text
    assert 'waiting_lora_adapters="c"' in text


def test_gauges_are_zero_while_the_engine_is_gone() -> None:
    app = FastAPI()
    app.include_router(router)
    replicas = SimpleNamespace(running=[], infos={})
    client: Any = SimpleNamespace(replicas=replicas, observers=[])
    metrics = ServerMetrics(EngineConfig(), client, memory_store(ServerConfig()))
    metrics.observer.on_stats(0, stats(num_running=3, num_preemptions=2, kv_cache_usage=0.5))

    async def as_text() -> bytes:
        return metrics.render()

    app.state.metrics = as_text
    samples = parse(TestClient(app).get("/metrics").text)
    assert samples["num_requests_running"] == samples["kv_cache_usage_perc"] == 0
    assert samples["num_preemptions_total"] == 2


def samples_after(*engines: EngineStats | None) -> dict[str, float]:
    """Metrics after engines, one after the other, have each reported this or nothing."""
    observer = MetricsObserver(EngineConfig(), "m")
    for reported in engines:
        observer.on_ready(0, INFO)
        if reported is not None:
            observer.on_stats(0, reported)
    return parse(observer.metrics.render().decode())


def test_gauges_are_zero_when_an_engine_is_back_without_work() -> None:
    samples = samples_after(stats(num_running=3, num_waiting=2, kv_cache_usage=0.5), None)
    assert samples["num_requests_running"] == samples["num_requests_waiting"] == 0
    assert samples["kv_cache_usage_perc"] == 0


def test_counters_go_on_after_the_engine_has_been_replaced() -> None:
    samples = samples_after(
        stats(num_preemptions=2, num_prefix_queries=50, num_prefix_hits=16),
        stats(num_preemptions=1, num_prefix_queries=10),  # a new engine counts from 0
    )
    assert samples["num_preemptions_total"] == 3
    assert samples["prefix_cache_queries_total"] == 60
    assert samples["prefix_cache_hits_total"] == 16


def test_registries_are_apart() -> None:
    one, other = Metrics("one"), Metrics("other")
    one.counter("requests_replayed").inc(5)
    other.counter("requests_replayed")
    assert b'requests_replayed_total{model_name="other"} 0.0' in other.render()
    assert b'requests_replayed_total{model_name="one"} 5.0' in one.render()


def record(
    num_prompt: int = 10, params: SamplingParams | PoolingParams | None = None
) -> RequestRecord:
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=[1] * num_prompt,
        params=params or SamplingParams(),
        seed=0,
    )
    return RequestRecord(request, submitted_at=0.0)


def test_the_throughput_log_is_silent_without_work(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    timers: list[Callable[[], None]] = []
    log = ThroughputLog(lambda: now, lambda delay_s, work: timers.append(work))
    assert not timers
    ours = record()
    with caplog.at_level(logging.INFO, "penstock.server.operations.throughput"):
        log.on_submit(ours)
        log.on_tokens(ours, 1, None)
        log.on_tokens(ours, 19, 1.0)
        log.on_stats(0, stats(num_running=1, num_prefix_queries=10, num_prefix_hits=5))
        now = 5.0
        timers.pop()()
        ours.finish_reason = FinishReason.STOP
        log.on_finish(ours)
        now = 10.0
        timers.pop()()
    assert not timers
    first, second = caplog.messages
    assert first == (
        "Throughput: prompt 2.0 tok/s, generation 4.0 tok/s; 1 running, 0 waiting; "
        "KV cache 0.0 % used; prefix hits 50.0 %"
    )
    assert "prompt 0.0 tok/s, generation 0.0 tok/s" in second
    log.on_submit(record())
    assert len(timers) == 1


def test_the_throughput_log_leaves_out_an_engine_that_died(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    timers: list[Callable[[], None]] = []
    log = ThroughputLog(lambda: now, lambda delay_s, work: timers.append(work))
    with caplog.at_level(logging.INFO, "penstock.server.operations.throughput"):
        log.on_submit(record())
        log.on_stats(0, stats(num_running=2))
        log.on_stats(1, stats(num_running=3))
        log.on_death(1)  # its requests are on the other engine
        log.on_stats(0, stats(num_running=5))
        now = 5.0
        timers.pop()()
    assert "; 5 running, 0 waiting; " in caplog.text


def test_the_throughput_log_counts_what_is_pooled(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    timers: list[Callable[[], None]] = []
    log = ThroughputLog(lambda: now, lambda delay_s, work: timers.append(work))
    with caplog.at_level(logging.INFO, "penstock.server.operations.throughput"):
        for reason in (FinishReason.STOP, FinishReason.STOP, FinishReason.ABORT):
            ours = record(10, PoolingParams())
            log.on_submit(ours)
            ours.finish_reason = reason
            log.on_finish(ours)
        log.on_stats(0, stats())
        now = 5.0
        timers.pop()()
    assert not timers
    (line,) = caplog.messages
    assert line.startswith("Throughput: prompt 4.0 tok/s, pooling 0.4 inputs/s; 0 running, ")


@pytest.mark.parametrize("is_off", [False, True])
def test_the_throughput_log_can_be_turned_off(is_off: bool) -> None:
    config = EngineConfig.from_options({"disable_log_stats": is_off})
    client: Any = SimpleNamespace(replicas=SimpleNamespace(infos={0: INFO}), observers=[])
    ServerMetrics(config, client, memory_store(ServerConfig()))
    assert [type(item) for item in client.observers] == [
        MetricsObserver,
        *([] if is_off else [ThroughputLog]),
    ]


@pytest.mark.parametrize("amount", [0.0, 0.001, 0.0011, 0.3, 1e9])
def test_many_equal_values_at_once_are_as_many_observations(amount: float) -> None:
    at_once, one_by_one = Metrics("tiny"), Metrics("tiny")
    at_once.histogram("inter_token_latency_seconds", engine="0").observe_many(amount, 4)
    for _ in range(4):
        one_by_one.histogram("inter_token_latency_seconds", engine="0").observe(amount)
    assert at_once.render() == one_by_one.render()
