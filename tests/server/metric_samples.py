"""Reads what /metrics gives."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from penstock.observability.declared import PREFIX


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
