"""The page of metrics, the dashboard and the alerts name what exists, and all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import metric_names
import pytest
import yaml

from penstock.observability.declared import DECLARED, OF_MODEL, PREFIX
from penstock.observability.docs import render

ROOT = Path(__file__).parents[2]


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
            assert set(metric_names.BOUNDS.get(name, ())) <= set(declared[name].buckets), name


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
