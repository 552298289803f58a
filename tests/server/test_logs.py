"""What the logs of requests say, and in which format."""

from __future__ import annotations

import json
import logging

import pytest

from penstock.config import ServerConfig
from penstock.engine.observer import RequestRecord
from penstock.observability.logs import JsonFormatter
from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import ConfigError
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams
from penstock.server.http.access import KeyRing
from penstock.server.http.exchange import HttpExchange
from penstock.server.operations.access_log import log_exchange
from penstock.server.operations.request_log import RequestLog

LOGGERS = "penstock.server.operations"


def as_json(record: logging.LogRecord) -> dict[str, object]:
    (line,) = JsonFormatter().format(record).splitlines()
    return json.loads(line)  # type: ignore[no-any-return]


def finished(tenant: str = "", first_token_at: float | None = 10.25) -> RequestRecord:
    request = EngineRequest(
        request_id="mine-3",
        prompt_token_ids=[1] * 7,
        params=SamplingParams(),
        seed=0,
        tenant=tenant,
    )
    record = RequestRecord(request, submitted_at=10.0, token_ids=[4, 5], replica=1)
    record.first_token_at, record.prefill_s, record.num_cached_tokens = first_token_at, 0.125, 3
    record.finished_at, record.finish_reason = 11.0, FinishReason.LENGTH
    return record


def test_a_request_is_logged_with_lengths_latencies_and_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, LOGGERS):
        RequestLog(lambda label: "key2").on_finish(finished(tenant="abc"))
    assert caplog.messages == [
        "Request mine-3 ended: key key2, finish_reason length, engine 1, num_prompt_tokens 7, "
        "num_cached_tokens 3, num_output_tokens 2, queue_ms 125.0, ttft_ms 250.0, e2e_ms 1000.0"
    ]
    line = as_json(caplog.records[0])
    assert line["request_id"] == "mine-3"
    assert (line["key"], line["finish_reason"], line["num_output_tokens"]) == ("key2", "length", 2)
    assert (line["queue_ms"], line["ttft_ms"], line["e2e_ms"]) == (125.0, 250.0, 1000.0)


def test_a_request_without_a_token_and_a_key_has_neither(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGERS):
        RequestLog(lambda label: "").on_finish(finished(first_token_at=None))
    line = as_json(caplog.records[0])
    assert "key" not in line
    assert line["ttft_ms"] is None


def test_keys_have_names_or_are_named_by_their_place() -> None:
    padded = "c2VjcmV0IG9mIGJlcnQ="
    config = ServerConfig(api_key=["carl=a=b", padded, "third"], admin_api_key=["root", "dora=d"])
    ring = KeyRing(config.client_keys + config.admin_keys)

    def name(key: str) -> str:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return ring.name_of(ring.owner({"type": "http", "headers": headers})[:16])

    keys = ["a=b", padded, "third", "root", "d"]
    assert [name(key) for key in keys] == ["carl", "key2", "key3", "admin1", "dora"]
    assert name("carl=a=b") == name("carl") == ""


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "number 2 must not be empty"),
        ("anna=", "nothing follows the ="),
        ("anna==", "nothing follows the ="),
        ("=secret", "must be NAME=KEY"),
        ("a\nb=secret", "must be NAME=KEY"),
    ],
)
def test_a_key_that_cannot_be_meant_is_refused_and_not_shown(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ServerConfig(api_key=["first", key])
    assert "secret" not in str(caught.value)


def test_an_access_log_line_stays_one_line(caplog: pytest.LogCaptureFixture) -> None:
    exchange = HttpExchange(
        "id-1", "10.0.0.7", "GET", "/v1\nfoo", "none", 404, 12, 34, duration_s=0.0125
    )
    with caplog.at_level(logging.INFO, LOGGERS):
        log_exchange(exchange)
    assert caplog.messages == ["10.0.0.7 GET /v1%0Afoo 404, 12 bytes in, 34 out, 12.5 ms, id id-1"]
    line = as_json(caplog.records[0])
    assert (line["request_id"], line["status"], line["duration_ms"]) == ("id-1", 404, 12.5)


def test_json_lines_have_time_level_and_traceback() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("penstock.x", logging.ERROR, "f.py", 1, "it %s", ("broke",), info)
    record.created, record.msecs = 1.5, 500
    line = as_json(record)
    assert line["time"] == "1970-01-01T00:00:01.500Z"
    assert (line["level"], line["logger"], line["message"]) == ("error", "penstock.x", "it broke")
    assert "ValueError: no\nway" in str(line["exception"])
