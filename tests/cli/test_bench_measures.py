"""When `penstock bench serve` sends requests, and how it counts what comes back."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from fake_openai import token

from penstock.cli.bench.load import Load, LoadResult
from penstock.cli.bench.serve_report import spread_ms, summarize
from penstock.cli.bench.streams import StreamRecord

# -- when requests are sent


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert Load().due_times(3, seed=0) == [0.0, 0.0, 0.0]


def test_arrivals_have_the_asked_rate_and_burstiness() -> None:
    for burstiness, variation in ((1.0, 1.0), (0.25, 2.0), (100.0, 0.1)):
        times = Load(request_rate=8.0, burstiness=burstiness).due_times(20_001, seed=1)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        std = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert times[0] == 0.0
        assert mean == pytest.approx(1 / 8, rel=0.1)
        assert std / mean == pytest.approx(variation, rel=0.1)


def test_a_seed_gives_the_same_arrivals_again() -> None:
    load = Load(request_rate=2.0)
    assert load.due_times(9, seed=1) == load.due_times(9, seed=1) != load.due_times(9, seed=2)


# -- how it is counted


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def recorded(*events: tuple[float, Any], sent: float = 0.0) -> StreamRecord:
    """A record to which these events came at these times."""
    clock = Clock()
    record = StreamRecord(sent, clock)
    record.on_status(200)
    for clock.now, value in events:
        text = value if isinstance(value, str) else json.dumps(value)
        record.on_body(f"data: {text}\n\n".encode())
    record.end()
    return record


def usage(count: int) -> dict[str, Any]:
    details = {"cached_tokens": 2}
    counts = {"prompt_tokens": 7, "completion_tokens": count, "prompt_tokens_details": details}
    return {"choices": [], "usage": counts}


def test_latencies_are_those_of_tokens() -> None:
    record = recorded(
        (1.0, token()),
        (1.5, token("")),
        (3.0, token("z", "stop")),
        (9.0, usage(5)),
        (9.0, "[DONE]"),
    )
    assert record.error is None
    assert (record.ttft, record.e2e) == (1.0, 3.0)
    assert record.itls == [0.5, 1.5]
    assert record.tpot == 0.5  # 2 s for the four tokens after the first
    assert (record.num_output_tokens, record.num_input_tokens) == (5, 7)
    assert record.num_cached_tokens == 2


def test_an_event_may_come_in_pieces_with_any_line_ends() -> None:
    record = StreamRecord(0.0, Clock())
    record.on_status(200)
    stream = b": hello\r\nevent: x\r\ndata:" + json.dumps(token("ä", "stop")).encode() + b"\r\n\r\n"
    for byte in stream:
        record.on_body(bytes([byte]))
    record.end()
    assert record.error is None
    assert record.num_output_tokens == 1


def test_one_token_has_no_time_per_token() -> None:
    record = recorded((1.0, token("x", "length")), (1.0, usage(1)))
    assert record.tpot is None
    result = LoadResult([record], 0.0, 2.0, 1)
    summary = summarize(result, {"tpot": 1.0})
    assert summary["tpot_ms"] is None
    assert summary["request_goodput"] == 0.5


def test_goodput_counts_requests_that_meet_every_goal() -> None:
    fast = recorded((0.1, token()), (0.2, token("x", "stop")))
    late = recorded((0.9, token()), (1.0, token("x", "stop")))
    slow = recorded((0.1, token()), (5.0, token("x", "stop")))
    failed = recorded((0.1, token()))
    result = LoadResult([fast, late, slow, failed], 0.0, 10.0, 4)
    assert summarize(result, {"ttft": 500})["request_goodput"] == pytest.approx(0.2)
    summary = summarize(result, {"ttft": 500, "tpot": 100, "e2el": 1000})
    assert summary["request_goodput"] == pytest.approx(0.1)
    assert summary["good_share"] == 0.25
    assert summary["request_throughput"] == pytest.approx(0.3)


def test_spreads_are_in_milliseconds() -> None:
    spread = spread_ms([0.001, 0.003])
    assert spread is not None
    assert (spread["mean"], spread["median"], spread["std"]) == pytest.approx((2.0, 2.0, 1.0))
    assert spread_ms([]) is None


@pytest.mark.parametrize(
    "value", ["not json", '{"choices": 5}', '{"choices": [{"text": 5}]}', "[1]"]
)
def test_an_event_that_makes_no_sense_fails_its_request(value: str) -> None:
    record = recorded((1.0, value), (2.0, token("x", "stop")))
    assert record.error is not None
    assert "not what it should be" in record.error
