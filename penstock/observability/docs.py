"""The page of all metrics: ``python -m penstock.observability.docs > docs/metrics.md``."""

from __future__ import annotations

from penstock.observability.metrics import DECLARED, Declared

_INTRODUCTION = """\
# Metrics

<!-- Written by `python -m penstock.observability.docs > docs/metrics.md`; edit the table in
penstock/observability/metrics.py. -->

`penstock serve` answers `GET /metrics` in Prometheus's text format. A server with API keys wants
one here too:

```yaml
scrape_configs:
  - job_name: penstock
    authorization: {credentials: KEY}  # where the server has keys
    static_configs: [{targets: ["localhost:8000"]}]
```

[deploy/grafana/penstock.json](../deploy/grafana/penstock.json) is a Grafana dashboard: import it
and choose the Prometheus data source. The server's own page, at `/`, draws the same numbers
without either.

The names are those of vLLM's metrics under another prefix, so that queries move over by replacing
`vllm:` with `penstock:`. Every metric has the label `model_name`, the first name that the model is
served under. A client's request with `n` completions counts as `n` requests, except in
`request_params_*`. A completed request is one that ended with `stop` or `length`. A histogram
`x` is queried as `x_bucket`, `x_sum` and `x_count`; its buckets end at 1, 2, 5, 10, 20, 50, ...
between the two numbers given here.

While requests run, a line in the log says every few seconds how many tokens come and go;
`--disable-log-stats` turns it off.
"""


def render() -> str:
    """The whole page as Markdown."""
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
