"""What /metrics says is what happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import metric_names
import pytest
from faults.saboteur import Fault, Gate, saboteur_options, seed_of
from metric_samples import parse
from prometheus_client.parser import text_string_to_metric_families
from server_process import DUMMY, ServerProcess
from waiting import eventually

from penstock.observability.declared import OF_MODEL, PREFIX


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
