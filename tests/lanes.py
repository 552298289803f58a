"""Which tests make up the fast lane, and which files come first.

The fast lane has the tests that start no process and load no real model.
They get the marker `fast`. Membership is computed: a test starts processes if its module, or the
module of one of its fixtures, imports `subprocess` or `multiprocessing`, or anything from a helper
module that does.
Processes that only the product starts cannot be seen that way: in the fast lane, a test skips
itself when it comes to that point.

With `--dist loadfile` a worker runs a whole file. A long one that starts late would keep one worker
busy at the end while the others have nothing left to do.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parent
REAL_MODELS = {"default_model", "default_gguf", "gemma_model"}  # fixtures
INTERPRETED = TESTS / "ops" / "gpu"  # kernels in Triton's interpreter, where there is no GPU
NOTHING: dict[str, Any] = {}
LONG_FILES = (  # the longest first
    "server/test_recovery.py",
    "server/test_recovery_processes.py",
    "server/test_schema.py",
    "server/test_processes.py",
    "server/test_ray.py",
    "engine/test_tensor_parallel.py",
    "engine/test_pipeline_parallel.py",
    "engine/test_nodes.py",
    "server/test_tool_choice.py",
    "server/test_overload.py",
    "server/test_fault_points.py",
    "server/test_page_pooling.py",
    "server/test_large_prompts.py",
    "server/test_adapter_service.py",
    "server/test_replica_routes.py",
    "server/test_replicated_server.py",
    "server/test_api_processes.py",
    "server/test_pooling_routes.py",
    "server/test_abandoned_grammars.py",
    "server/test_page.py",
    "server/test_page_chat.py",
    "server/test_adapter_options.py",
    "server/test_responses_tools.py",
    "server/test_structured.py",
    "server/test_chaos.py",
    "server/test_hostile_load.py",
    "server/test_images.py",
    "models/test_vision.py",
    "models/test_gguf_vision.py",
    "engine/test_any_mix.py",
    "engine/test_rank_mix.py",
    "engine/test_pipeline_stages.py",
    "engine/test_gemma_gguf.py",
    "engine/test_default_model.py",
    "engine/test_native_cpu.py",
    "engine/test_int8_kv_cache.py",
    "engine/test_async_llm.py",
    "cli/test_commands_end_to_end.py",
    "cli/test_run_batch.py",
    "lora/test_two_ranks.py",
    "lora/test_adapters_together.py",
    "lora/test_merge.py",
    "models/test_expert_models.py",
    "engine/test_expert_parallel.py",
    "models/test_gguf_models.py",
    "models/test_parity.py",
    "ops/gpu/test_device_path.py",
    "test_example_daily_report.py",
    "test_install.py",
)


def long_files_first(items: list[pytest.Item]) -> None:
    places = {TESTS / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def mark_fast(items: list[pytest.Item]) -> None:
    known: dict[int, bool] = {}
    for item in items:
        if isinstance(item, pytest.Function) and is_fast(item, known):
            item.add_marker(pytest.mark.fast)


def is_fast(item: pytest.Function, known: dict[int, bool]) -> bool:
    if item.get_closest_marker("slow") is not None:
        return False
    if REAL_MODELS & set(item.fixturenames) or INTERPRETED in item.path.parents:
        return False
    fixtures = [each for defs in item._fixtureinfo.name2fixturedefs.values() for each in defs]
    scopes = [vars(item.module), *(globals_of(fixture.func) for fixture in fixtures)]
    return not any(starts_processes(scope, known) for scope in scopes)


def starts_processes(scope: dict[str, Any], known: dict[int, bool]) -> bool:
    """Whether a module of the tests can, by its globals; `known` are answers by their id."""
    import multiprocessing  # as globals, these would be every test's
    import subprocess

    if id(scope) not in known:
        known[id(scope)] = False  # while it is looked at
        values = list(scope.values())
        known[id(scope)] = any(
            value is subprocess
            or value is multiprocessing
            or starts_processes(globals_of(value), known)
            for value in values
        )
    return known[id(scope)]


def globals_of(value: Any) -> dict[str, Any]:
    """Of the module that something comes from; nothing unless it is one of the tests'."""
    scope: dict[str, Any] = getattr(value, "__globals__", NOTHING)
    if isinstance(value, ModuleType):
        scope = vars(value)
    elif isinstance(value, type) and value.__module__ in sys.modules:
        scope = vars(sys.modules[value.__module__])
    path = scope.get("__file__")
    return scope if path is not None and TESTS in Path(path).parents else NOTHING


def skip_at_processes() -> None:
    """From now on, a test that starts another Python is skipped."""
    main = threading.main_thread()

    def skip(*_: object) -> None:
        pytest.skip("starts a process: not in the fast lane")

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "subprocess.Popen" or sys.executable not in map(str, arguments[1]):
            return
        if threading.current_thread() is main:
            skip()
        # The test may wait for what this thread does: it is the one to end.
        signal.pthread_kill(main.ident or 0, signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, skip)
    sys.addaudithook(look)
