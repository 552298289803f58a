"""The report on the environment, also where half of it is missing."""

from __future__ import annotations

import builtins
import importlib.metadata
import json
import os
import platform
import re
from typing import Any

import pytest

import penstock
from penstock.cli import collect_env
from penstock.cli.main import main


def test_json_has_versions_and_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["penstock"] == penstock.__version__
    assert facts["python"] == platform.python_version()
    assert facts["torch"]["version"].startswith(importlib.metadata.version("torch").split("+")[0])
    assert facts["packages"]["msgspec"] == importlib.metadata.version("msgspec")
    required = importlib.metadata.requires("penstock") or []
    names = {re.split(r"[^A-Za-z0-9._-]", line)[0] for line in required if "extra ==" not in line}
    listed = {"torch", *(name.replace("_", "-") for name in facts["packages"])}
    assert {name.replace("_", "-") for name in names} <= listed
    assert facts["cpu"]["cores"] == os.cpu_count()


def test_text_names_the_same_things(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"penstock: {penstock.__version__}" in lines
    assert f"  msgspec: {importlib.metadata.version('msgspec')}" in lines


@pytest.mark.parametrize("missing", [ImportError("no torch"), OSError("libcudart.so: not found")])
def test_a_missing_or_broken_torch_is_reported(
    missing: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_import = builtins.__import__

    def without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise missing
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    assert main(["collect-env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["torch"]["error"] == str(missing)


def test_a_system_that_tells_nothing_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(collect_env, "_proc_fields", lambda path: {})
    monkeypatch.setattr(collect_env, "PACKAGES", ("no-such-package",))
    assert main(["collect-env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "memory_gib: none" in lines
    assert "  model: none" in lines
    assert "  no-such-package: none" in lines


def test_several_gpus_are_listed_one_by_one() -> None:
    gpus = [{"name": "A"}, {"name": "B"}]
    assert collect_env._lines({"gpus": gpus}) == ["gpus 0:", "  name: A", "gpus 1:", "  name: B"]
