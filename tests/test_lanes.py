"""Which tests are in the fast lane."""

from __future__ import annotations

import chaos
import pytest
import tiny_engine
from faults import streams
from lanes import LONG_FILES, TESTS, globals_of, is_fast, starts_processes


@pytest.mark.parametrize("helper", [chaos, streams, streams.Streams, streams.Answer])
def test_who_can_start_a_server_can_start_processes(helper: object) -> None:
    assert starts_processes(globals_of(helper), {})


@pytest.mark.parametrize("helper", [tiny_engine, tiny_engine.open_llm, pytest, 5])
def test_who_opens_a_model_in_this_process_cannot(helper: object) -> None:
    assert not starts_processes(globals_of(helper), {})


def test_a_test_beside_such_helpers_is_not_in_the_fast_lane(request: pytest.FixtureRequest) -> None:
    assert isinstance(request.node, pytest.Function)
    assert not is_fast(request.node, {})


def test_the_files_that_come_first_are_there() -> None:
    assert [name for name in LONG_FILES if not (TESTS / name).is_file()] == []
