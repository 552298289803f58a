"""A real Prometheus scrapes a server that has vLLM's prefix, with the alert rules loaded."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess
from waiting import eventually

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = [
    line.split()
    for line in (Path(__file__).parent / "vllm_dashboard.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.fixture(scope="module")
def served(serve_module: Callable[..., ServerProcess]) -> ServerProcess:
    """A server that has completed a request."""
    server = serve_module("--metrics-prefix", "vllm:", "--served-model-name", "m")
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == 200
    eventually(server.is_idle)
    return server


def test_a_dashboard_of_vllm_finds_its_series(served: ServerProcess) -> None:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(served.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    missing = [
        (name, labels) for name, *labels in DASHBOARD if not {*labels} <= found.get(name, set())
    ]
    assert not missing


@pytest.fixture
def prometheus(served: ServerProcess, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Ask Prometheus's API for a path."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus, of Debian's package prometheus")
    rules = yaml.safe_load(ALERTS.read_text().replace("penstock:", "vllm:"))
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    target = {"targets": [f"127.0.0.1:{served.port}"]}
    config = {
        "global": {"scrape_interval": "100ms", "evaluation_interval": "100ms"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [{"job_name": "penstock", "static_configs": [target]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=file,
            stderr=file,
        )
    try:
        port = re.compile(r"127\.0\.0\.1:([1-9]\d*)")
        eventually(lambda: port.search(log.read_text()) is not None)
        found = port.search(log.read_text())
        assert found is not None
        url = f"http://127.0.0.1:{found[1]}/api/v1/"

        def ask(path: str, **params: str) -> Any:
            answer = httpx.get(url + path, params=params, timeout=60).json()
            assert answer["status"] == "success", answer
            return answer["data"]

        yield ask
    finally:
        process.terminate()
        process.wait()


def test_prometheus_answers_queries_and_evaluates_the_alerts(
    prometheus: Callable[..., Any],
) -> None:
    def value(query: str) -> float | None:
        found = prometheus("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    eventually(lambda: value('sum(vllm:generation_tokens_total{model_name="m"})') == 4)
    assert value('sum(vllm:request_success_total{finished_reason="length"})') == 1
    latency = "histogram_quantile(0.99, sum by (le) (vllm:e2e_request_latency_seconds_bucket))"
    assert (value(latency) or 0) > 0

    def rules() -> list[dict[str, Any]]:
        (group,) = prometheus("rules")["groups"]
        return group["rules"]

    eventually(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert {rule["health"] for rule in rules()} == {"ok"}
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []
