"""What `penstock bench serve` sends, how it counts, and that it survives any server."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openai import (
    END,
    HEAD,
    Answer,
    FakeServer,
    Script,
    complete,
    delta,
    event,
    token,
    whole,
)

from penstock.cli.bench import plot as plot_module
from penstock.cli.bench.http import Address
from penstock.cli.bench.load import Load, LoadResult
from penstock.cli.bench.prompts import BenchRequest, prompts_from_args
from penstock.cli.bench.serve_report import spread_ms, summarize
from penstock.cli.bench.streams import StreamRecord
from penstock.cli.main import build_parser, main
from penstock.protocol.errors import ConfigError

SMALL = ("--num-prompts", "3", "--input-len", "5", "--output-len", "4")


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the command against a script and gives the report; `.server` is the last one."""

    def run(script: Script, *flags: str, code: int = 0) -> dict[str, Any]:
        with FakeServer(script) as server:
            assert main(["bench", "serve", "--base-url", server.url, *flags, "--json", "-"]) == code
        captured = capsys.readouterr()
        report: dict[str, Any] = json.loads(captured.out)
        return report | {"table": captured.err, "server": server}

    return run


# -- the whole command against a server of which everything is known


def test_completed_requests_are_counted_by_the_servers_usage(bench: Any) -> None:
    report = bench(complete, *SMALL)
    assert (report["completed"], report["failed"], report["errors"]) == (3, 0, [])
    assert report["token_counts"] == "usage"
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (15, 12)
    assert report["output_throughput"] == pytest.approx(12 / report["duration_s"])
    assert report["total_token_throughput"] == pytest.approx(27 / report["duration_s"])
    assert len(report["requests"]) == 3
    for row in report["requests"]:
        assert len(row["itls_ms"]) == 3
        assert 0 <= row["start_s"] <= row["start_s"] + row["ttft_ms"] / 1e3 <= row["end_s"]
    assert set(report["ttft_ms"]) == {"mean", "median", "std", "p90", "p99", "max"}
    assert "3 completed, 0 failed" in report["table"]
    assert "15 in (0 cached), 12 out, counted by usage" in report["table"]


def test_requests_ask_for_exact_lengths_with_token_ids(bench: Any) -> None:
    report = bench(complete, *SMALL, "--api-key", "secret", "--extra-body", '{"top_k": 5}')
    server: FakeServer = report["server"]
    assert report["model"] == "fake-model"
    assert set(server.paths) == {"/v1/completions"}
    trial, *bodies = server.bodies
    assert trial["max_tokens"] == 1
    assert len(bodies) == 3
    for body in bodies:
        assert len(body["prompt"]) == 5
        assert all(isinstance(token_id, int) for token_id in body["prompt"])
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (4, 0.0, True)
        assert (body["stream"], body["top_k"]) == (True, 5)
        assert body["stream_options"] == {"include_usage": True}
    assert all(headers["authorization"] == "Bearer secret" for headers in server.headers)


def test_a_null_in_the_extra_body_removes_a_field(bench: Any) -> None:
    flags = ("--extra-body", '{"temperature": null}', "--no-ignore-eos")
    server: FakeServer = bench(complete, *SMALL, *flags)["server"]
    assert not {"temperature", "ignore_eos"} & server.bodies[-1].keys()


def test_chat_sends_words_and_counts_what_is_said(bench: Any) -> None:
    async def chat(server: FakeServer, body: dict[str, Any]) -> Answer:
        yield HEAD
        yield event(delta(role="assistant", content=""))  # no token
        yield event(delta(reasoning="hm"))
        yield event(delta(content="a"))
        yield event(delta(content=""))  # a token without text
        yield event(delta("stop"))  # no token
        yield event("[DONE]")
        yield END

    report = bench(chat, *SMALL, "--backend", "openai-chat", "--model", "mine")
    server: FakeServer = report["server"]
    assert set(server.paths) == {"/v1/chat/completions"}
    assert server.bodies[-1]["model"] == "mine"
    ((role, text),) = [(m["role"], m["content"]) for m in server.bodies[-1]["messages"]]
    assert (role, len(text.split())) == ("user", 5)
    assert report["token_counts"] == "chunks"
    assert report["total_output_tokens"] == 9
    assert "counted by chunks" in report["table"]


def test_what_a_server_does_not_take_is_left_out(bench: Any) -> None:
    async def plain(server: FakeServer, body: dict[str, Any]) -> Answer:
        if "stream_options" in body:
            yield whole(422, {"detail": "stream_options: extra fields not permitted"})
        elif not isinstance(body["prompt"], str):
            yield whole(400, {"error": {"message": "prompt must be a string"}})
        else:
            async for piece in complete(server, body):
                yield piece

    report = bench(plain, *SMALL)
    assert report["completed"] == 3
    assert "words in place of token ids" in report["prompts"]
    assert len(report["server"].bodies[-1]["prompt"].split()) == 5


def test_failures_are_grouped_and_the_others_still_count(bench: Any) -> None:
    async def mixed(server: FakeServer, body: dict[str, Any]) -> Answer:
        match len(server.bodies) % 6:
            case 1:
                async for piece in complete(server, body):
                    yield piece
            case 2 | 3:
                yield whole(429, {"error": {"message": "the queue is full"}})
            case 4:
                yield HEAD
                yield event(token())
                yield event({"error": {"message": "the engine died", "code": 503}})
                yield event("[DONE]")
                yield END
            case 5:
                yield HEAD
                yield event(token())  # and the connection closes
            case 0:
                yield HEAD
                yield event(token())
                yield END

    flags = ("--num-prompts", "12", "--max-concurrency", "1", "--output-len", "2")
    report = bench(mixed, *flags)
    counts = {item["error"]: item["count"] for item in report["errors"]}
    assert report["completed"] == 2
    assert report["failed"] == 10
    assert counts == {
        "HTTP 429: the queue is full": 4,
        "error in the stream: the engine died": 2,
        "the connection was closed in the middle of the response": 2,
        "the stream ended without a finish reason": 2,
    }
    assert report["total_output_tokens"] == 4
    assert "failed: 4 x HTTP 429: the queue is full" in report["table"]
    assert sum("error" in row for row in report["requests"]) == 10


def test_a_request_that_takes_too_long_has_failed(bench: Any) -> None:
    async def hang(server: FakeServer, body: dict[str, Any]) -> Answer:
        if len(server.bodies) == 1:
            async for piece in complete(server, body):
                yield piece
            return
        yield HEAD
        yield event(token())
        await asyncio.Event().wait()

    report = bench(hang, *SMALL, "--timeout", "0.2", code=1)
    (group,) = report["errors"]
    assert group == {"count": 3, "error": "no complete answer within 0.2 s"}
    assert report["ttft_ms"] is None


def test_a_limit_on_concurrency_is_reached_and_kept(bench: Any) -> None:
    async def in_threes(server: FakeServer, body: dict[str, Any]) -> Answer:
        while len(server.bodies) > 1 and (len(server.bodies) - 1) % 3:
            await asyncio.sleep(0)  # until three are there
        async for piece in complete(server, body):
            yield piece

    report = bench(in_threes, *SMALL, "--num-prompts", "9", "--max-concurrency", "3")
    assert report["completed"] == 9
    assert report["max_concurrent_requests"] == 3
    assert report["server"].max_in_flight == 3


def test_connections_are_used_again(bench: Any) -> None:
    report = bench(complete, *SMALL, "--num-prompts", "20", "--max-concurrency", "1")
    assert report["completed"] == 20
    assert report["server"].num_connections == 1


def test_a_connection_that_was_closed_while_idle_is_no_failure(bench: Any) -> None:
    async def close_after(server: FakeServer, body: dict[str, Any]) -> Answer:
        async for piece in complete(server, body):
            yield piece
        yield b""  # the server then closes, though it did not say so

    report = bench(close_after, *SMALL, "--num-prompts", "20", "--max-concurrency", "1")
    assert (report["completed"], report["failed"]) == (20, 0)
    assert report["server"].num_connections == 21


def test_warm_up_requests_are_not_measured_and_have_other_prompts(bench: Any) -> None:
    report = bench(complete, *SMALL, "--num-warmups", "4")
    assert report["completed"] == 3
    _, *bodies = report["server"].bodies
    warm, measured = bodies[:4], bodies[4:]
    assert len(measured) == 3
    assert [len(body["prompt"]) for body in warm] == [5] * 4
    assert not {tuple(b["prompt"]) for b in warm} & {tuple(b["prompt"]) for b in measured}


def test_reference_workloads_go_over_http_as_they_are(bench: Any) -> None:
    report = bench(complete, "--workload", "cpu_c")
    assert (report["completed"], report["total_output_tokens"]) == (32, 32 * 64)
    assert report["workload"] == "cpu_c"


def test_open_loop_requests_start_when_they_are_due(bench: Any) -> None:
    report = bench(complete, *SMALL, "--request-rate", "500", "--seed", "3")
    due = [row["due_s"] for row in report["requests"]]
    assert due == pytest.approx(Load(request_rate=500).due_times(3, seed=3))
    assert all(row["start_s"] >= row["due_s"] for row in report["requests"])


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(complete) as server:
        url = server.url
    assert main(["bench", "serve", "--base-url", url]) == 1
    assert "cannot connect to 127.0.0.1:" in capsys.readouterr().err


def test_a_server_that_refuses_all_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(server: FakeServer, body: dict[str, Any]) -> Answer:
        yield whole(401, {"error": {"message": "who are you?"}})

    with FakeServer(refuse) as server:
        assert main(["bench", "serve", "--base-url", server.url]) == 1
    assert len(server.bodies) == 1
    assert "failed: HTTP 401: who are you?" in capsys.readouterr().err


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


# -- what is sent


def prompts(*flags: str) -> Any:
    arguments = ["bench", "serve", "--base-url", "http://x", *flags]
    return prompts_from_args(build_parser().parse_args(arguments))


def test_lengths_are_drawn_around_what_was_asked() -> None:
    drawn = prompts("--num-prompts=400", "--input-len=10", "--output-len=100", "--range-ratio=0.5")
    lengths = {len(request.prompt) for request in drawn.requests}
    assert lengths == set(range(5, 16))
    assert all(50 <= request.output_len <= 150 for request in drawn.requests)
    flags = ("--num-prompts=3", "--input-len=10")
    assert prompts(*flags, "--seed=1").requests == prompts(*flags, "--seed=1").requests
    assert prompts(*flags, "--seed=1").requests != prompts(*flags, "--seed=2").requests


def test_a_file_gives_prompts_and_is_repeated_as_often_as_needed(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello", "output_len": 7}\n\n{"prompt": [1, 2], "x": 1}\n')
    flags = ("--dataset", "custom", "--dataset-path", str(path), "--output-len", "9")
    given = prompts(*flags)
    assert given.requests == [BenchRequest("hello", 7), BenchRequest([1, 2], 9)]
    assert not given.ignore_eos
    assert len(prompts(*flags, "--num-prompts", "5").requests) == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "x"}\nnonsense', "line 2 of"),
        ('{"text": "x"}', "missing required field `prompt`"),
        ('{"prompt": "x", "output_len": 0}', "output_len must be at least 1"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        prompts("--dataset", "custom", "--dataset-path", str(path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workload", "cpu_c", "--input-len", "5"], "drop input_len"),
        (["--workload", "cpu_c", "--dataset", "random"], "drop dataset"),
        (["--dataset", "custom"], "give --dataset-path"),
        (["--dataset-path", "x"], "drop dataset_path"),
        (["--base-url", "localhost:8000"], "base_url must look like http://"),
        (["--base-url", "http://x:port"], "base_url must look like http://"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--base-url", "http://x", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--goodput", "itl:5"],
        ["--goodput", "ttft"],
        ["--request-rate", "0"],
        ["--burstiness", "nan"],
        ["--range-ratio", "1"],
        ["--extra-body", "[1]"],
    ],
)
def test_values_that_make_no_sense_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", "--base-url", "http://x", *flags])
    assert caught.value.code == 2


def test_addresses_of_all_kinds_are_understood() -> None:
    assert Address.parse("http://host") == Address("host", 80, "", False)
    assert Address.parse("https://host/llm/v1/") == Address("host", 443, "/llm", True)
    assert Address.parse("http://[::1]:80") == Address("::1", 80, "", False)
    assert Address.parse("unix:///run/p.sock").uds == "/run/p.sock"


# -- the picture


def test_the_plot_is_a_picture_of_a_run_with_failures(bench: Any, tmp_path: Path) -> None:
    async def every_other(server: FakeServer, body: dict[str, Any]) -> Answer:
        if len(server.bodies) % 2 == 0:
            yield whole(500, {"error": {"message": "no"}})
        else:
            async for piece in complete(server, body):
                yield piece

    target = tmp_path / "run.png"
    bench(every_other, *SMALL, "--plot", str(target))
    assert target.read_bytes().startswith(b"\x89PNG\r\n")
    assert target.stat().st_size > 10_000


def test_a_run_in_which_all_failed_can_be_drawn(bench: Any, tmp_path: Path) -> None:
    async def only_the_trial(server: FakeServer, body: dict[str, Any]) -> Answer:
        if len(server.bodies) > 1:
            yield whole(500, "no")
        else:
            async for piece in complete(server, body):
                yield piece

    target = tmp_path / "run.png"
    bench(only_the_trial, *SMALL, "--plot", str(target), code=1)
    assert target.exists()


def test_without_matplotlib_the_extra_is_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"penstock\[plot\]"):
        plot_module.require_matplotlib()
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--plot", "x.png"]) == 2


# -- the real thing


@pytest.fixture
def served(default_model: str) -> Iterator[str]:
    """The address of a real server with the default model."""
    where = ["--port", "0", "--host", "127.0.0.1"]
    small = ["--cpu-threads", "1", "--kv-cache-memory-bytes", "256MiB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", default_model, *where, *small],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    yield next(line.split()[1] for line in process.stdout if line.startswith("  API "))
    process.terminate()
    process.wait()


def test_the_real_server_is_measured_over_both_endpoints(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for backend in ("openai", "openai-chat"):
        report = tmp_path / f"{backend}.json"
        where = ["--base-url", served, "--backend", backend, "--json", str(report)]
        assert main(["bench", "serve", *where, *SMALL, "--goodput", "ttft:60000"]) == 0
        result = json.loads(report.read_text())
        assert (result["completed"], result["failed"]) == (3, 0)
        assert (result["total_output_tokens"], result["token_counts"]) == (12, "usage")
        assert result["good_share"] == 1.0
        assert all(len(row["itls_ms"]) == 3 for row in result["requests"])
        assert 0 < result["ttft_ms"]["median"] < result["e2el_ms"]["median"]
        assert "counted by usage" in capsys.readouterr().out
    assert result["total_input_tokens"] > 15  # the chat template's own tokens
