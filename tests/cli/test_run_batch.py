"""Batch files: each line fares alone, and a second run goes on where the first one stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from faults.saboteur import Fault, Gate, saboteur_options, seed_of
from server.server_process import engines_of, environment

from penstock.cli.main import main
from penstock.cli.run_batch import describe
from penstock.protocol.errors import ConfigError, EngineDeadError
from penstock.server.batch import files as batch_files
from penstock.server.batch.files import BatchOutput, OutputError, read_lines
from penstock.server.batch.run import Batch, BatchSummary

Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]


def line(custom_id: Any, **fields: Any) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}}
    return json.dumps(request | fields)


async def echo(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    return 200, {"path": path, "sent": body, "usage": usage}


def fake_app(answer: Answer) -> Any:
    """An ASGI app that answers as `answer` says."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
        status, reply = await answer(scope["path"], json.loads(body))
        headers = [(b"x-request-id", b"req-1")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        content = json.dumps(reply).encode()
        await send({"type": "http.response.body", "body": content[:3], "more_body": True})
        await send({"type": "http.response.body", "body": content[3:]})

    return app


class Files:
    """A batch's two files."""

    def __init__(self, folder: Path) -> None:
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"

    def run(self, *lines: str, answer: Answer = echo, max_concurrency: int = 2) -> BatchSummary:
        self.input.write_text("\n".join(lines))
        with contextlib.closing(BatchOutput(self.output)) as output:
            batch = Batch(fake_app(answer), output, max_concurrency)
            asyncio.run(batch.run(read_lines(self.input)))
            return batch.summary

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.output.read_text().splitlines()]

    def result(self, custom_id: str | None) -> dict[str, Any]:
        (found,) = [item for item in self.results() if item["custom_id"] == custom_id]
        return found


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_an_answer_stands_beside_its_custom_id(files: Files) -> None:
    summary = files.run(line("a", url="/v1/chat/completions", body={"messages": [], "n": 1.5}))
    result = files.result("a")
    assert result["id"].startswith("batch_req_")
    assert result["error"] is None
    body = result["response"].pop("body")
    assert result["response"] == {"status_code": 200, "request_id": "req-1"}
    assert body["path"] == "/v1/chat/completions"
    assert body["sent"] == {"messages": [], "n": 1.5}
    assert (summary.num_input_tokens, summary.num_output_tokens) == (2, 3)


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/score", "/v2/rerank", "/classify"])
def test_batches_may_ask_for_vectors_and_scores(files: Files, url: str) -> None:
    summary = files.run(line("a", url=url, body={"input": "text"}))
    assert summary.num_completed == 1
    assert files.result("a")["response"]["body"]["path"] == url


@pytest.mark.parametrize(
    ("bad", "code", "param", "message"),
    [
        ("{", "invalid_json_line", None, "not valid JSON"),
        ("[1]", "invalid_json_line", None, "must contain a JSON object"),
        pytest.param(
            '{"a": ' + "[" * 50_000, "invalid_json_line", None, "less deeply", id="nested deeply"
        ),
        ('{"url": "/v1/completions", "body": {}}', "missing_required_parameter", "custom_id", "no"),
        (line(7), "invalid_value", "custom_id", "must be a string, got 7"),
        ('{"custom_id": "x", "body": {}}', "missing_required_parameter", "url", "no url"),
        ('{"custom_id": "x", "url": "/v1/completions"}', "missing_required_parameter", "body", ""),
        (line("x", url="/v1/paintings"), "invalid_url", "url", "got /v1/paintings"),
        (line("x", method="GET"), "invalid_method", "method", "must be POST, got GET"),
        (line("x", body=[1]), "invalid_value", "body", "must be a JSON object"),
        (line("x", body={"stream": True}), "invalid_value", "body.stream", "stream must be off"),
        (line("x", body={"stream": "True"}), "invalid_value", "body.stream", "stream must be off"),
        (line("x", body={"stream": 1}), "invalid_value", "body.stream", "stream must be off"),
        (line("x", body={"background": True}), "invalid_value", "body.background", "must be off"),
        (line("a"), "duplicate_custom_id", "custom_id", "on an earlier line"),
    ],
)
def test_a_bad_line_fails_alone(
    files: Files, bad: str, code: str, param: str | None, message: str
) -> None:
    summary = files.run(line("a"), "", bad, line("b"))
    assert (summary.num_completed, summary.num_failed) == (2, 1)
    assert summary.first_errors[0].startswith("line 3: ")
    (failed,) = [item for item in files.results() if item["error"] is not None]
    assert failed["response"] is None
    assert (failed["error"]["code"], failed["error"]["param"]) == (code, param)
    assert failed["error"]["line"] == 3
    assert message in failed["error"]["message"]
    assert {item["custom_id"] for item in files.results() if item["response"]} == {"a", "b"}


def test_a_line_that_is_too_long_fails_alone_and_is_never_held_whole(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 100)
    files.run(line("a"), line("long", body={"prompt": "x" * 1000}), line("b"))
    assert files.result(None)["error"]["code"] == "line_too_long"
    assert files.result("b")["response"]["status_code"] == 200
    assert max(len(text) for _, text in read_lines(files.input)) == 101


def test_a_request_that_the_api_refuses_fails_alone(files: Files) -> None:
    async def refuse_b(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body.get("bad"):
            return 400, {"error": {"message": "no such thing", "code": 400}}
        return await echo(path, body)

    summary = files.run(line("a"), line("b", body={"bad": 1}), line("c"), answer=refuse_b)
    assert (summary.num_completed, summary.num_failed) == (2, 1)
    assert summary.first_errors == ["b: no such thing"]
    result = files.result("b")
    assert result["error"] is None
    assert result["response"]["status_code"] == 400
    assert result["response"]["body"]["error"]["message"] == "no such thing"


def test_no_more_requests_run_at_once_than_allowed(files: Files) -> None:
    running, most = 0, 0

    async def watch(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 200, {}

    files.run(*(line(str(i)) for i in range(20)), answer=watch, max_concurrency=3)
    assert most == 3
    assert len(files.results()) == 20


def test_results_are_written_as_they_finish(files: Files) -> None:
    async def last_first(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body == {"wait": True}:
            while len(files.results()) < 2:
                await asyncio.sleep(0)
        return 200, {}

    files.run(line("slow", body={"wait": True}), line("b"), line("c"), answer=last_first)
    assert [item["custom_id"] for item in files.results()] == ["b", "c", "slow"]


def test_a_second_run_answers_only_what_is_missing(files: Files) -> None:
    lines = [line("a"), "nonsense", line("a"), line("b", body={"bad": 1}), line("c")]
    files.run(*lines[:4])
    before = files.results()
    summary = files.run(*lines)
    assert (summary.num_completed, summary.num_failed, summary.num_skipped) == (1, 0, 4)
    assert files.results()[:-1] == before
    assert files.results()[-1]["custom_id"] == "c"
    assert files.run(*lines).num_skipped == 5


def test_a_line_is_not_skipped_for_its_duplicates_error(files: Files) -> None:
    async def die(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        while len(files.results()) < 1:
            await asyncio.sleep(0)
        return 503, {"error": {"message": "the engine died"}}

    with pytest.raises(EngineDeadError, match="the engine died"):
        files.run(line("a"), line("a"), answer=die)
    assert files.result("a")["error"]["code"] == "duplicate_custom_id"
    summary = files.run(line("a"), line("a"))
    assert (summary.num_completed, summary.num_skipped) == (1, 1)


def test_a_result_that_a_crash_cut_short_is_run_again(files: Files) -> None:
    files.run(line("a"), line("b"))
    whole = files.output.read_bytes()
    first_end = whole.index(b"\n") + 1
    for end in range(first_end, len(whole)):
        files.output.write_bytes(whole[:end])
        files.run(line("a"), line("b"))
        assert [item["custom_id"] for item in files.results()] == ["a", "b"]


def test_a_slow_disk_costs_time_only(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    append, read = BatchOutput._append, batch_files.read_lines

    def append_slowly(self: BatchOutput, data: bytes) -> None:
        time.sleep(0.02)
        append(self, data)

    def read_slowly(path: Path) -> Iterator[tuple[int, bytes]]:
        for numbered in read(path):
            time.sleep(0.02)
            yield numbered

    monkeypatch.setattr(BatchOutput, "_append", append_slowly)
    monkeypatch.setitem(globals(), "read_lines", read_slowly)
    lines = [line(str(number)) for number in range(8)]
    assert files.run(*lines, max_concurrency=4).num_completed == 8
    assert sorted(item["custom_id"] for item in files.results()) == [str(n) for n in range(8)]


def test_a_full_disk_ends_the_run_and_keeps_what_is_written(files: Files) -> None:
    files.run(line("a"))
    size = files.output.stat().st_size
    lines = [line(custom_id) for custom_id in "abcdef"]
    with largest_file(2 * size + size // 2), pytest.raises(OutputError, match="make room"):
        files.run(*lines, max_concurrency=4)
    assert [item["custom_id"] for item in files.results()] == ["a", "b"]
    assert files.run(*lines).num_completed == 4
    assert [item["custom_id"] for item in files.results()] == list("abcdef")


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Files of this process can have so many bytes; of what is written, only that much fits."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("content", ["a letter to my aunt", '{"id":"batch_req_1"}\n', "{}\n"])
def test_a_file_that_is_no_output_is_left_alone(files: Files, content: str) -> None:
    files.output.write_text(content)
    with pytest.raises(ConfigError, match="is not a result of a batch"):
        files.run(line("a"))
    assert files.output.read_text() == content


def test_the_death_of_the_engine_ends_the_run_and_answers_nobody(files: Files) -> None:
    async def die(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body == {"last": True}:
            return 503, {"error": {"message": "the engine died"}}
        if body == {"wait": True}:
            await asyncio.Event().wait()
        return 200, {}

    lines = [line("a"), line("b", body={"wait": True}), line("c", body={"last": True}), line("d")]
    with pytest.raises(EngineDeadError):
        files.run(*lines, answer=die)
    assert [item["custom_id"] for item in files.results()] == ["a"]
    assert files.run(*lines).num_completed == 3


def test_the_summary_names_the_first_failures(tmp_path: Path) -> None:
    summary = BatchSummary(num_completed=3, num_skipped=1, num_output_tokens=40)
    for number in range(7):
        summary.count_failure(f"line {number}", "bad")
    text = describe(summary, 2.0, tmp_path / "out", is_done=False)
    assert "3 completed, 7 failed, 1 skipped" in text
    assert "20.0 output tokens/s" in text
    assert text.count("failed: line") == 5
    assert "and 2 more" in text
    assert "Not finished" in text


def test_files_that_cannot_work_cost_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    present = tmp_path / "in.jsonl"
    present.write_text("")
    for files in (["-i", "no/such", "-o", "out"], ["-i", str(present), "-o", str(present)]):
        assert main(["run-batch", *files]) == 2
    missing, same = capsys.readouterr().err.splitlines()
    assert "cannot read no/such" in missing
    assert "would be added to the input" in same


# -- the real thing


def start(
    model: str, files: Files, *flags: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "run-batch", model]
    where = ["-i", str(files.input), "-o", str(files.output)]
    small = ["--kv-cache-memory-bytes", "256MiB", "--cpu-threads", "1"]
    return subprocess.Popen(
        [*command, *where, *small, *flags],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(env or {}),
    )


def test_the_default_model_answers_a_batch_though_its_engine_dies(
    default_model: str, files: Files
) -> None:
    greedy = {"max_tokens": 8, "temperature": 0}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    lines = [
        line("text", body={"prompt": "The capital of France is", **greedy}),
        line("chat", url="/v1/chat/completions", body={"messages": question, **greedy}),
        line(
            "response",
            url="/v1/responses",
            body={"input": question, "max_output_tokens": 8, "temperature": 0},
        ),
        line("wrong", body={"prompt": "x", "max_tokens": -1}),
        "nonsense",
    ]
    held = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "seed": seed_of(Fault.WAIT, 30)}
    files.input.write_text("\n".join([*lines, line("long", body=held)]))
    saboteur, options = saboteur_options(files.output.with_name("flag"))
    gate = Gate(files.output.with_name("flag"))
    gate.close()
    process = start(default_model, files, *saboteur, **options)
    asyncio.run(gate.reached())
    (engine,) = engines_of(process.pid)
    os.kill(engine, signal.SIGKILL)
    gate.open()
    out, log = process.communicate(timeout=240)
    assert process.returncode == 0, log
    assert out == ""
    assert "The engine died (signal 9)" in log
    assert "4 completed, 2 failed, 0 skipped" in log
    usage = files.result("long")["response"]["body"]["usage"]
    assert usage["completion_tokens"] == 60
    text = files.result("text")["response"]["body"]
    assert text["choices"][0]["text"].startswith(" Paris")
    chat = files.result("chat")["response"]["body"]
    assert chat["object"] == "chat.completion"
    assert len(chat["choices"][0]["message"]["content"]) > 0
    response = files.result("response")["response"]["body"]
    assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    wrong = files.result("wrong")["response"]
    assert wrong["status_code"] == 400
    assert wrong["body"]["error"]["param"] == "max_tokens"


def test_a_batch_of_which_every_line_failed_says_so(default_model: str, files: Files) -> None:
    files.input.write_text("\n".join([line("a", body={"prompt": 1}), "nonsense"]))
    for skipped in (0, 2):  # nor does it succeed when it is run again
        process = start(default_model, files)
        _, log = process.communicate(timeout=240)
        assert process.returncode == 4, log
        assert f"0 completed, {2 - skipped} failed, {skipped} skipped" in log
        assert "All 2 lines failed." in log
