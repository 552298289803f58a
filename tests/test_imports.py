"""Nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "numpy", "yaml", "huggingface_hub", "tokenizers", "jinja2"}
REPORT = """
import atexit, json, sys
atexit.register(lambda: print("MODULES " + json.dumps(sorted(sys.modules))))
"""


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT + code], capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    return {name.partition(".")[0] for name in json.loads(line.removeprefix("MODULES "))}


def test_importing_penstock_imports_nothing_heavy() -> None:
    modules = modules_after("import penstock; penstock.SamplingParams()")
    assert "penstock" in modules
    assert not modules & HEAVY


COMMANDS = [
    *("serve", "generate", "chat", "complete", "run-batch", "merge", "plan", "replicas"),
    *("collect-env", "bench", "bench throughput", "bench latency", "bench startup"),
    *("bench serve", "bench compare", "bench sweep", "bench attention"),
]
HELP = """
import sys
from penstock.cli.main import main
for command in COMMANDS:
    try:
        main(command.split())
    except SystemExit:
        pass
    print("AFTER", command, *(HEAVY & set(sys.modules)))
"""


def test_help_imports_nothing_heavy() -> None:
    commands = ["--version", "--help", *(f"{name} --help" for name in COMMANDS)]
    code = HELP.replace("COMMANDS", repr(commands)).replace("HEAVY", repr(HEAVY))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = [line for line in done.stdout.splitlines() if line.startswith("AFTER ")]
    assert after == [f"AFTER {command}" for command in commands]


def test_a_refused_option_costs_no_import_of_torch() -> None:
    modules = modules_after(
        "from penstock.cli.main import main\n"
        "assert main(['generate', '--block-size', '3', 'x']) == 2"
    )
    assert "torch" not in modules


def test_an_engine_in_this_process_needs_no_sockets() -> None:
    modules = modules_after("import penstock.llm, penstock.engine.build")
    assert "torch" in modules
    assert "zmq" not in modules


def test_a_name_that_penstock_does_not_have_is_an_attribute_error() -> None:
    import penstock

    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = penstock.LLMM


def test_a_server_without_traces_imports_no_tracing() -> None:
    modules = modules_after(
        "import sys, penstock.server.app, penstock.server.run\n"
        "assert 'penstock.server.operations.tracing' not in sys.modules\n"
        "assert 'opentelemetry.sdk' not in sys.modules"  # the API may be imported by others
    )
    assert "fastapi" in modules
    assert "torch" not in modules


DIVISION = """
from pathlib import Path
from penstock.config import EngineConfig
from penstock.loading.source import ModelSource
from penstock.models.division import check_division
source = ModelSource("x", Path("x"), "folder", CONFIG, {}, (), None, "")
check_division(EngineConfig.from_options({"tensor_parallel_size": 2}), source)
"""


def test_finding_out_whether_ranks_divide_a_model_imports_no_compiler() -> None:
    """torch's takes longer to import than the models take to build, before each start of ranks."""
    from tiny_models import config_of

    modules = modules_after(DIVISION.replace("CONFIG", repr(config_of("llama"))))
    assert "torch" in modules
    assert not modules & {"sympy", "triton"}
