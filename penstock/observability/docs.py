"""Writes the metrics page: ``python -m penstock.observability.docs > docs/metrics.md``."""

from __future__ import annotations

from penstock.observability.declared import DECLARED, Declared

_INTRODUCTION = """\
# Metrics

<!-- Written by `python -m penstock.observability.docs > docs/metrics.md`; edit the table in
penstock/observability/declared.py. -->

`penstock serve` exposes Prometheus metrics at `GET /metrics`.

## Setting up Prometheus and Grafana

```yaml
scrape_configs:
  - job_name: penstock
    authorization: {credentials: KEY}  # if the server requires an API key
    static_configs: [{targets: ["localhost:8000"]}]
```

[deploy/grafana/penstock.json](../deploy/grafana/penstock.json) is a Grafana dashboard. Import it
and choose the Prometheus data source.
[deploy/prometheus/alerts.yml](../deploy/prometheus/alerts.yml) has alert rules: crashes, failing
requests, growing queues, late tokens, preemptions. Without Prometheus, the server's web page at
`/` charts the same metrics live.

While requests run, the server also logs its throughput every 5 seconds. `--disable-log-stats` turns
that off.

## What to watch

```
# Is the server overloaded? This stays above 0.
penstock:num_requests_waiting
# How long do users wait for the first token, and between tokens?
histogram_quantile(0.95, sum by (le) (rate(penstock:time_to_first_token_seconds_bucket[5m])))
histogram_quantile(0.95, sum by (le) (rate(penstock:inter_token_latency_seconds_bucket[5m])))
# Is the KV cache too small? This stays above 0.
rate(penstock:num_preemptions_total[5m])
# What share of the prompts does the prefix cache serve?
rate(penstock:prefix_cache_hits_total[5m]) / rate(penstock:prefix_cache_queries_total[5m])
# Tokens per second
rate(penstock:generation_tokens_total[1m])
# Do requests fail?
rate(penstock:request_success_total{finished_reason="error"}[5m])
# Does an engine crash?
increase(penstock:engine_restarts_total[1h])
# With several replicas: is the load balanced?
max(penstock:num_requests_running) / avg(penstock:num_requests_running)
```

## Reference

- The names are vLLM's with another prefix. `--metrics-prefix vllm:` gives them vLLM's, so that its
  dashboards and alerts work unchanged.
- Metrics with the prefix have the label `model_name`: the first name that the model is served
  under.
- `engine` is the index of the [replica](scaling.md), 0 if there is only one. It is empty for
  requests that ended before they were given to a replica.
- A client's request with `n` completions counts as `n` requests, except in `request_params_*` and
  `request_max_num_generation_tokens`.
- The process that serves HTTP also exports the client library's `process_*` metrics, such as
  `process_resident_memory_bytes` and `process_start_time_seconds`. Engines are other processes.
- A completed request is one that finished with `stop` or `length`.
- A histogram `x` is queried as `x_bucket`, `x_sum` and `x_count`. Its bucket bounds are 1, 2, 5,
  10, 20, 50, ... within the range given below.
"""


def render() -> str:
    """Return the whole page as Markdown."""
    rows = ["| metric | kind | labels | buckets | |", "|---|---|---|---|---|"]
    for item in DECLARED:
        labels = ", ".join(f"`{label}`" for label in item.labels)
        cells = (f"`{item.full_name}`", item.kind, labels, _buckets(item), item.help)
        rows.append("| " + " | ".join(cells) + " |")
    return _INTRODUCTION + "\n" + "\n".join(rows) + "\n"


def _buckets(item: Declared) -> str:
    return f"{item.buckets[0]:g} to {item.buckets[-1]:g}" if item.buckets else ""


if __name__ == "__main__":
    print(render(), end="")
