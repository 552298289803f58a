"""What `penstock bench serve` reports, and that it survives any server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openai import END, HEAD, Answer, FakeServer, Script, complete, delta, event, token, whole

from penstock.cli.bench import plot as plot_module
from penstock.cli.bench.load import Load
from penstock.cli.main import main
from penstock.protocol.errors import ConfigError

SMALL = ("--num-prompts", "3", "--input-len", "5", "--output-len", "4")


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the command against a script and gives the report; `.server` is the last one."""

    def run(script: Script, *flags: str, code: int = 0, metrics: str = "") -> dict[str, Any]:
        with FakeServer(script) as server:
            server.metrics = metrics
            assert main(["bench", "serve", "--base-url", server.url, *flags, "--json", "-"]) == code
        captured = capsys.readouterr()
        report: dict[str, Any] = json.loads(captured.out)
        return report | {"table": captured.err, "server": server}

    return run


def test_turns_of_a_conversation_follow_their_answers(bench: Any) -> None:
    async def parrot(server: FakeServer, body: dict[str, Any]) -> Answer:
        yield HEAD
        for text in ("answer ", str(len(body["messages"]))):
            yield event(delta(content=text))
        yield event(delta("stop"))
        yield event("[DONE]")
        yield END

    flags = ("--dataset", "conversations", "--num-turns", "3", "--backend", "openai-chat")
    report = bench(parrot, *flags, *SMALL)
    assert report["completed"] == len(report["requests"]) == 9
    last = [m for m in (b["messages"] for b in report["server"].bodies) if len(m) == 5]
    assert len(last) == 3
    for messages in last:
        assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]
        assert [m["content"] for m in messages[1::2]] == ["answer 1", "answer 3"]


def test_vllms_flags_and_the_names_in_its_results(bench: Any, tmp_path: Path) -> None:
    report = bench(
        complete,
        *("--backend", "vllm", "--dataset-name", "random", "--num-prompts", "3"),
        *("--random-input-len", "5", "--random-output-len", "4", "--random-range-ratio", "0"),
        *("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9"),
        *("--top-k", "5", "--header", "X-Team=a", "--metadata", "gpu=h200"),
        *("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "500"),
        *("--ramp-up-end-rps", "1000", "--trust-remote-code", "--tokenizer", "x"),
        *("--save-result", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"),
    )
    assert report["backend"] == "openai"
    assert report["server"].bodies[-1]["top_k"] == 5
    assert "500 to 1000 requests/s, linear" in report["table"]
    assert "TTFT" in report["table"]
    assert "TPOT" not in report["table"]
    saved = json.loads((tmp_path / "new" / "r.json").read_text())
    assert saved["p99.9_ttft_ms"] == report["ttft_ms"]["p99.9"]
    assert saved["mean_tpot_ms"] == report["tpot_ms"]["mean"]
    assert (saved["num_prompts"], saved["request_rate"]) == (3, "inf")
    assert saved["metadata"] == {"gpu": "h200"}
    assert "requests" not in saved


def test_requests_carry_ids_and_reports_are_appended(bench: Any, tmp_path: Path) -> None:
    saved = ("--save-result", "--append-result", "--result-dir", str(tmp_path))
    for _ in range(2):
        report = bench(
            complete,
            *("--endpoint-type", "vllm", "--request-id-prefix", "run-", "--insecure", "--profile"),
            *(*saved, "--result-filename", "r.jsonl", *SMALL),
        )
    sent = [each.get("x-request-id", "") for each in report["server"].headers]
    assert len({each for each in sent if each.startswith("run-")}) >= 3
    assert report["server"].paths.count("/start_profile") == 1
    assert report["server"].paths[-1] == "/stop_profile"
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [3, 3]


def test_requests_of_a_file_keep_their_order_and_number(bench: Any, tmp_path: Path) -> None:
    conversations = [
        {"conversations": [{"from": "human", "value": f"say {n}"}, {"from": "gpt", "value": "a b"}]}
        for n in range(4)
    ]
    (tmp_path / "s.json").write_text(json.dumps(conversations))
    flags = ("--dataset", "sharegpt", "--dataset-path", str(tmp_path / "s.json"))
    report = bench(complete, *flags, "--disable-shuffle", "--no-oversample", "--num-prompts", "9",
                   "--max-concurrency", "1")  # fmt: skip
    assert [body["prompt"] for body in report["server"].bodies][-4:] == [
        f"say {n}" for n in range(4)
    ]
    assert report["completed"] == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "vllm-rerank"], "vllm-rerank is not supported: use penstock bench throughp"),
        (["--backend", "openia"], "must be one of openai, vllm, openai-chat, openai-embeddings"),
        (["--self-timed"], "set the arrivals with --request-rate"),
        (["--hf-split", "train"], "give it as --dataset-path"),
        (["--num-prompt", "4"], "did you mean --num-prompts?"),
    ],
)
def test_flags_that_only_vllm_has_say_what_to_do(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *flags])
    assert message in capsys.readouterr().err


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


def test_drafts_are_counted_from_the_servers_metrics(bench: Any) -> None:
    metrics = (
        'vllm:spec_decode_num_drafts_total{{model_name="m"}} {0}\n'
        'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {0}0.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {0}\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} 9\n'
    )
    report = bench(complete, *SMALL, "--num-warmups", "2", metrics=metrics)
    assert report["num_drafts"] == report["num_accepted_tokens"] == 3  # no warm-up's
    assert report["num_draft_tokens"] == 30
    assert report["mean_acceptance_length"] == 2.0
    assert "3 of 30 accepted, mean acceptance length 2.00" in report["table"]
    assert ", mean acceptance length 2.00" in plot_module._title(report)
    assert "num_drafts" not in bench(complete, *SMALL)


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


def test_each_request_asks_for_the_model_or_an_adapter_at_random(bench: Any) -> None:
    def models(*flags: str) -> list[str]:
        report = bench(complete, "--num-prompts", "60", *SMALL[2:], *flags)
        assert report["lora_modules"] == ["sql", "law"]
        assert "fake-model, sql, law" in report["table"]
        return [body["model"] for body in report["server"].bodies[1:]]

    flags = ("--lora-modules", "sql", "law", "--max-concurrency", "1")
    asked = models(*flags)
    assert set(asked) == {"fake-model", "sql", "law"}
    assert models(*flags) == asked
    assert models(*flags, "--seed", "1") != asked


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

    report = bench(hang, *SMALL, "--timeout", "5", code=1)
    (group,) = report["errors"]
    assert group == {"count": 3, "error": "no complete answer within 5 s"}
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
        for row in result["requests"]:  # a chunk holds one token, or from a busy server more
            assert len(row["itls_ms"]) <= 3
            assert 0 < row["ttft_ms"] <= (row["end_s"] - row["start_s"]) * 1e3 + 1e-6
        assert "counted by usage" in capsys.readouterr().out
    assert result["total_input_tokens"] > 15  # the chat template's own tokens
