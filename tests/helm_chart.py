"""Renders the Helm chart as Helm would, with a Go template engine in Python.

    python tests/helm_chart.py > deploy/kubernetes/penstock.yaml

Helm itself is not needed: the chart uses Go's template language, Sprig's functions and Helm's own
(`include`, `toYaml`, `toJson`).
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "penstock"
MANIFESTS = CHART.parents[1] / "kubernetes" / "penstock.yaml"
AUTOSCALED = {"autoscaling": {"enabled": True}}  # what the plain manifests contain
HEADER = """\
# Written by `python tests/helm_chart.py > deploy/kubernetes/penstock.yaml`: the Helm chart with
# autoscaling. Set the image and the options in the Secret, then: kubectl apply -f penstock.yaml
# The autoscaler needs a metric: see prometheus-adapter.yaml. Without it, delete that object.
"""


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def render(changes: dict[str, Any], release: str = "penstock", service: str = "Helm") -> str:
    """The chart's objects with these values. Raises if the values' schema refuses them."""
    from gotpl.exts.helm import HelmTemplateEngine

    values = merged(yaml.safe_load((CHART / "values.yaml").read_text()), changes)
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    context = {
        "Values": values,
        "Chart": {key[0].upper() + key[1:]: value for key, value in chart.items()},
        "Release": {"Name": release, "Namespace": "default", "Service": service},
    }
    sources = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
    engine = HelmTemplateEngine(sources, strict=True)
    rendered = engine.render(
        dict.fromkeys((name for name in sources if not name.startswith("_")), context)
    )
    objects = [text.strip() for name, text in rendered.items() if name.endswith(".yaml")]
    return "---\n".join(f"{text}\n" for text in objects if text)


def objects(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each is not None]


def plain_manifests() -> str:
    return HEADER + render(AUTOSCALED, service="kubectl")


if __name__ == "__main__":
    sys.stdout.write(plain_manifests())
