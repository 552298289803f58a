"""What /metrics says is what happened."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import metric_names
import msgspec
import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from faults.saboteur import Fault, Gate, saboteur_options, seed_of
from prometheus_client.parser import text_string_to_metric_families
from server_process import DUMMY, ServerProcess
from waiting import eventually

from penstock.config import EngineConfig, ServerConfig
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.metrics_observer import MetricsObserver
from penstock.engine.observer import RequestRecord
from penstock.observability.declared import DECLARED, OF_MODEL, PREFIX
from penstock.observability.docs import render
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

ROOT = Path(__file__).parents[2]
INFO = EngineInfo(
    StepLimits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64), num_kv_blocks=7
)


def parse(text: str) -> dict[str, float]:
    """Samples by name without the prefix; a finished_reason or a bucket's bound follows it."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(PREFIX):
                continue
            assert sample.labels["model_name"]
            label = sample.labels.get("finished_reason") or sample.labels.get("le")
            name = sample.name.removeprefix(PREFIX)
            samples[f"{name}:{label}" if label else name] = sample.value
    return samples


# -- a real server


@pytest.fixture(scope="module")
def flag_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flag") / "flag"


@pytest.fixture(scope="module")
def gate(flag_path: Path) -> Gate:
    """Holds the server's engine."""
    return Gate(flag_path)


@pytest.fixture(scope="module")
def server(tiny_model: Path, flag_path: Path) -> Iterator[ServerProcess]:
    """A tiny model with 16 blocks of 16 tokens: just enough for one request of full length."""
    saboteur, options = saboteur_options(flag_path)
    flags = (*DUMMY, *saboteur, "--num-gpu-blocks-override", "17", "--served-model-name", "tiny")
    with ServerProcess(str(tiny_model), *flags, **options) as process:
        yield process


def scrape(server: ServerProcess) -> dict[str, float]:
    response = server.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'model_name="tiny"' in response.text
    return parse(response.text)


class Change:
    """What metrics have become more by since it was made, once the server is idle."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = scrape(server)

    def get(self) -> Callable[[str], float]:
        eventually(self._server.is_idle)
        after = scrape(self._server)
        return lambda name: after[name] - self._before.get(name, 0.0)


def complete(server: ServerProcess, prompt: list[int], **fields: Any) -> Any:
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_every_declared_metric_is_there_from_the_start(server: ServerProcess) -> None:
    names = {name.partition(":")[0] for name in scrape(server)}
    declared = [name.removeprefix(PREFIX) for item in OF_MODEL for name in item.sample_names]
    later = {  # their labels are known with LoRA, a drafter or tools only
        "lora_requests_info",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "tool_call_parser_invocations_total",
    }
    assert names == set(declared) - later


def test_http_and_process_metrics_are_there(server: ServerProcess) -> None:
    def get() -> dict[tuple[str, str], float]:
        return {
            (sample.name, sample.labels.get("handler", "")): sample.value
            for family in text_string_to_metric_families(server.get("/metrics").text)
            for sample in family.samples
        }

    server.get("/v1/models")
    before = get()
    assert {name for name, _ in before} >= set(metric_names.OTHERS)
    complete(server, [1, 2, 3], max_tokens=2)
    server.get("/v1/models")
    server.get("/nowhere")
    after = get()

    def grown(name: str, handler: str) -> float:
        return after[name, handler] - before.get((name, handler), 0.0)

    assert grown("http_requests_total", "/v1/models") == 1
    assert grown("http_requests_total", "/v1/completions") == 1
    assert grown("http_requests_total", "none") == 1
    assert grown("http_request_duration_seconds_count", "/v1/completions") == 1
    assert grown("http_request_size_bytes_sum", "/v1/completions") > 0
    assert grown("http_response_size_bytes_sum", "/v1/completions") > 0


def test_every_metric_of_vllm_that_applies_is_there() -> None:
    declared = {item.name: item for item in OF_MODEL}
    kinds = {
        "gauge": metric_names.GAUGES,
        "counter": metric_names.COUNTERS,
        "histogram": metric_names.HISTOGRAMS,
    }
    for kind, names in kinds.items():
        for name in names:
            if name in metric_names.DO_NOT_APPLY:
                assert name not in declared, f"{name} applies by now: say so"
                continue
            assert declared[name].kind == kind, name
            wanted = set(metric_names.LABELS.get(name, ()))
            if name not in metric_names.WITHOUT_ENGINE:
                wanted.add("engine")
            assert wanted <= set(declared[name].labels), name


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


def test_known_requests_are_counted_exactly(server: ServerProcess) -> None:
    change = Change(server)
    prompt = [7] * 40
    complete(server, prompt, max_tokens=5)
    complete(server, prompt, max_tokens=5)  # two blocks of it are cached by now
    complete(server, list(range(10)), max_tokens=4, n=3)
    refused = server.post("/v1/completions", {"prompt": [1], "temperature": -1})
    assert refused.status_code == 400
    by = change.get()

    assert by("prompt_tokens_total") == 40 + 40 + 3 * 10
    assert by("generation_tokens_total") == 5 + 5 + 3 * 4
    assert by("prompt_tokens_cached_total") == 32
    assert by("request_prefill_kv_computed_tokens_sum") == 40 + 8 + 3 * 10
    assert by("request_max_num_generation_tokens_count") == 3
    assert by("request_max_num_generation_tokens_sum") == 5 + 5 + 4
    assert by("prefix_cache_queries_total") == 40 + 40 + 3 * 10
    assert by("prefix_cache_hits_total") == 32
    assert by("request_success_total:length") == 5
    assert by("request_success_total:stop") == by("request_success_total:error") == 0
    assert by("num_preemptions_total") == 0
    # A step computes what is not cached of a prompt, and each token but the last.
    assert by("iteration_tokens_total_sum") == 40 + 4 + 8 + 4 + 3 * (10 + 3)
    assert by("eager_steps_total") == by("iteration_tokens_total_count") > 0
    assert by("graph_steps_total") == 0

    for name in (
        "time_to_first_token_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_prefill_kv_computed_tokens",
    ):
        assert by(f"{name}_count") == 5, name
    assert by("inter_token_latency_seconds_count") == 4 + 4 + 3 * 3
    assert by("request_prompt_tokens_sum") == 110
    assert by("request_generation_tokens_sum") == 22
    assert by("request_generation_tokens_bucket:2.0") == 0
    assert by("request_generation_tokens_bucket:5.0") == 5
    assert by("request_params_n_count") == by("request_params_max_tokens_count") == 3
    assert by("request_params_n_sum") == 1 + 1 + 3
    assert by("request_params_max_tokens_sum") == 5 + 5 + 4


def test_times_add_up(server: ServerProcess) -> None:
    change = Change(server)
    complete(server, [3] * 50, max_tokens=20)
    by = change.get()
    queue, prefill = by("request_queue_time_seconds_sum"), by("request_prefill_time_seconds_sum")
    first, decode = by("time_to_first_token_seconds_sum"), by("request_decode_time_seconds_sum")
    whole = by("e2e_request_latency_seconds_sum")
    assert min(queue, prefill, decode) > 0
    assert queue + prefill == pytest.approx(first)
    assert by("request_inference_time_seconds_sum") == pytest.approx(prefill + decode)
    assert by("inter_token_latency_seconds_sum") == pytest.approx(decode)
    assert by("request_time_per_output_token_seconds_sum") == pytest.approx(decode / 19)
    assert first + decode <= whole


def test_ends_are_counted_by_their_reason(server: ServerProcess, gate: Gate) -> None:
    change = Change(server)
    complete(server, [1, 2, 3], max_tokens=9, allowed_token_ids=[5], stop_token_ids=[5])
    body = {"prompt": [1, 2], "max_tokens": 250, "ignore_eos": True, "stream": True}
    gate.close()
    held = {**body, "seed": seed_of(Fault.WAIT, 9)}
    with server.client() as client, client.stream("POST", "/v1/completions", json=held) as answer:
        next(answer.iter_lines())  # and leave
    eventually(lambda: server.get("/load").json()["server_load"] == 0)
    gate.open()
    by = change.get()
    assert by("request_success_total:stop") == 1
    assert by("request_success_total:abort") == 1
    assert by("request_success_total:length") == by("request_success_total:error") == 0
    assert by("e2e_request_latency_seconds_count") == 1
    assert by("time_to_first_token_seconds_count") == 2


def test_preemptions_are_counted(server: ServerProcess) -> None:
    change = Change(server)
    complete(server, list(range(100, 110)), max_tokens=200, n=2)  # 28 blocks, where there are 16
    by = change.get()
    assert by("num_preemptions_total") >= 1
    assert by("generation_tokens_total") == 400
    assert by("time_to_first_token_seconds_count") == 2


def test_gauges_are_zero_without_work(server: ServerProcess) -> None:
    complete(server, [1, 2, 3], max_tokens=3)
    eventually(server.is_idle)
    samples = scrape(server)
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [samples[name] for name in gauges] == [0, 0, 0]
    assert samples["cache_config_info"] == 1
    assert 'num_gpu_blocks="16"' in server.get("/metrics").text


def test_what_is_kept_is_shown(server: ServerProcess) -> None:
    change = Change(server)
    made = server.post("/v1/conversations", {"metadata": {"topic": "tea"}}).json()["id"]
    more = change.get()
    assert (more("stored_responses"), more("stored_response_bytes") > 0) == (1, True)
    with server.client() as client:
        client.delete(f"/v1/conversations/{made}")
    less = change.get()
    assert (less("stored_responses"), less("stored_response_bytes")) == (0, 0)


def test_throughput_is_logged_while_there_is_work(server: ServerProcess) -> None:
    complete(server, [1, 2, 3], max_tokens=3)
    line = re.compile(r"Throughput: prompt [\d.]+ tok/s, generation [\d.]+ tok/s; \d+ running, ")
    eventually(lambda: any(line.search(text) for text in server.log))


# -- what a server does not show on demand


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


# -- documents


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == render(), (
        "run: python -m penstock.observability.docs > docs/metrics.md"
    )


def series_in(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The series that a query selects, with the labels that it selects them by."""
    pattern = r"((?:penstock:|http_|process_)\w+)(?:\{([^}]*)\})?"
    for name, selector in re.findall(pattern, expression):
        yield name, set(re.findall(r"(\w+)\s*[=!]~?", selector))


def dashboard_queries() -> list[str]:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "penstock.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def alert_queries() -> list[str]:
    text = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    (group,) = yaml.safe_load(text)["groups"]
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"], rule["alert"]
    return [rule["expr"] for rule in group["rules"]]


@pytest.mark.parametrize("queries", [dashboard_queries, alert_queries])
def test_dashboard_and_alerts_query_only_what_exists(queries: Callable[[], list[str]]) -> None:
    labels = {
        name: {*item.labels, *(["model_name"] if item.prefix else [])}
        for item in DECLARED
        for name in item.sample_names
    }
    labels |= {name: set() for name in metric_names.OTHERS if name.startswith("process_")}
    queried = set()
    for expression in queries():
        assert expression.count("(") == expression.count(")"), expression
        for name, selected_by in series_in(expression):
            assert name in labels, f"{name} does not exist: {expression}"
            unknown = selected_by - labels[name] - {"job", "instance"}  # which Prometheus adds
            assert not unknown, f"{name} has no label {unknown}: {expression}"
            queried.add(name)
    assert PREFIX + "time_to_first_token_seconds_bucket" in queried


def test_prometheus_takes_the_alerts_and_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    queries = [
        query.replace("$__rate_interval", "5m").replace("$model_name", ".*")
        for query in dashboard_queries()
    ]
    rules = [{"record": f"panel{n}", "expr": query} for n, query in enumerate(queries)]
    as_rules = tmp_path / "dashboard.yml"
    as_rules.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    for path in (ROOT / "deploy" / "prometheus" / "alerts.yml", as_rules):
        done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("amount", [0.0, 0.001, 0.0011, 0.3, 1e9])
def test_many_equal_values_at_once_are_as_many_observations(amount: float) -> None:
    at_once, one_by_one = Metrics("tiny"), Metrics("tiny")
    at_once.histogram("inter_token_latency_seconds", engine="0").observe_many(amount, 4)
    for _ in range(4):
        one_by_one.histogram("inter_token_latency_seconds", engine="0").observe(amount)
    assert at_once.render() == one_by_one.render()
