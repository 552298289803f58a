"""An install without compiler and CMake: it succeeds, models run on torch, and it is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
GENERATE = """
import sys
from penstock import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", cpu_threads=1, max_model_len=64) as llm:
    print(len(llm.generate(["hello"], SamplingParams(max_tokens=4))[0].outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip put the package, with no program to be found but Python itself."""
    folder = tmp_path_factory.mktemp("install")
    source, target, no_programs = folder / "source", folder / "target", folder / "bin"
    no_programs.mkdir()
    shutil.copytree(
        PROJECT / "penstock",
        source / "penstock",
        ignore=shutil.ignore_patterns("__pycache__", "libpenstock_cpu.*"),
    )
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source / name)
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--target", target, source,
        ],
        env=environment | {"PATH": str(no_programs)},
        check=True,
    )  # fmt: skip
    return target


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with that installation; -S, or an editable one would come first."""
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    result = subprocess.run(
        [sys.executable, "-S", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=installed,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result


def test_the_package_is_there_without_the_library(installed: Path) -> None:
    assert (installed / "penstock" / "ops" / "cpu" / "library.py").exists()
    assert not list(installed.rglob("libpenstock_cpu.*"))


def test_models_run_on_torch_and_the_log_says_so(installed: Path, default_model: str) -> None:
    result = run(installed, "-c", GENERATE, default_model)
    assert result.stdout.split() == ["4"]
    assert "The C++ library for CPUs is not used: not built" in result.stderr
    assert "Models run on plain torch" in result.stderr


def test_collect_env_says_so(installed: Path) -> None:
    environment = json.loads(run(installed, "-m", "penstock", "collect-env", "--json").stdout)
    assert environment["cpu_library"].startswith("not built")
    assert environment["cpu_library"].endswith("models run on plain torch")
