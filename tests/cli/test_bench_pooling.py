"""Benchmarks of pooling models: offline, and of a server's embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_openai import Answer, FakeServer, Script, whole

from penstock.cli.main import main

SMALL = ("--num-prompts", "3", "--input-len", "5")
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10_001,  # more than the largest token that benchmarks draw
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.fixture
def pooling_model(tmp_path: Path) -> list[str]:
    """The flags of a tiny embedding model."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--cpu-threads", "1"]
    flags += ["--kv-cache-memory-bytes", str(1 << 20), "--log-level", "error"]
    return ["--model", str(tmp_path), "--runner", "pooling", *flags]


def test_throughput_of_a_pooling_model_is_in_texts(
    pooling_model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", *SMALL, *pooling_model, "--json", "-"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["num_texts"], report["num_tokens"]) == (3, 15)
    assert report["texts_per_s"] == pytest.approx(3 / report["elapsed_s"])
    assert report["tokens_per_s"] == pytest.approx(15 / report["elapsed_s"])
    assert "texts_per_s" in captured.err
    assert not {"output_tokens_per_s", "num_output_tokens"} & report.keys()


def test_latency_of_a_pooling_model_is_that_of_the_batch(
    pooling_model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--batch-size", "2", "--input-len", "4", "--num-iters", "1")
    assert main(["bench", "latency", *shape, *pooling_model, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["batch_size"], report["num_tokens"]) == (2, 8)
    assert report["total_ms"]["p50"] > 0
    assert "time_to_first_token_ms" not in report


def test_a_pooling_model_has_no_output_length(
    pooling_model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", *SMALL, "--output-len", "4", *pooling_model]) == 2
    assert "output_len is for models that generate" in capsys.readouterr().err


# -- over HTTP


def vector(num_tokens: int) -> bytes:
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return whole(200, {"data": [{"index": 0, "embedding": "AACAPw=="}], "usage": usage})


async def embed(server: FakeServer, body: dict[str, Any]) -> Answer:
    given = body["input"]
    yield vector(len(given.split()) if isinstance(given, str) else len(given))


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command against a script and gives the report."""

    def run(script: Script, *flags: str, code: int = 0) -> dict[str, Any]:
        with FakeServer(script) as server:
            command = ["bench", "serve", "--base-url", server.url]
            assert main([*command, "--backend", "openai-embeddings", *flags, "--json", "-"]) == code
        captured = capsys.readouterr()
        return json.loads(captured.out) | {"table": captured.err, "server": server}

    return run


def test_each_request_is_a_text_and_each_answer_a_vector(bench: Any) -> None:
    report = bench(embed, *SMALL, "--goodput", "e2el:600000")
    server: FakeServer = report["server"]
    assert set(server.paths) == {"/v1/embeddings"}
    for body in server.bodies[1:]:  # after the trial
        assert body.keys() == {"model", "input", "encoding_format"}
        assert len(body["input"]) == 5
    assert (report["completed"], report["failed"]) == (3, 0)
    assert (report["total_input_tokens"], report["good_share"]) == (15, 1.0)
    assert report["total_token_throughput"] == pytest.approx(15 / report["duration_s"])
    assert set(report["e2el_ms"]) == {"mean", "median", "std", "p90", "p99", "max"}
    assert not {"ttft_ms", "tpot_ms", "itl_ms", "output_throughput"} & report.keys()
    assert "texts/s" in report["table"]
    assert "TTFT" not in report["table"]
    for row in report["requests"]:
        assert row["num_input_tokens"] == 5
        assert row["start_s"] <= row["end_s"]


def test_a_server_that_takes_no_token_ids_gets_words(bench: Any) -> None:
    async def only_text(server: FakeServer, body: dict[str, Any]) -> Answer:
        if not isinstance(body["input"], str):
            yield whole(400, {"error": {"message": "input must be a string"}})
        else:
            async for piece in embed(server, body):
                yield piece

    report = bench(only_text, *SMALL)
    assert (report["completed"], report["total_input_tokens"]) == (3, 15)
    assert "words in place of token ids" in report["prompts"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (whole(500, {"error": {"message": "broken"}}), "HTTP 500: broken"),
        (whole(200, {"object": "list"}), "missing required field `data`"),
        (whole(200, {"data": []}), "0 vectors"),
        (whole(200, {"data": [{"index": 0}]}), "missing required field `embedding`"),
    ],
)
def test_an_answer_without_its_vector_is_a_failure(bench: Any, answer: bytes, words: str) -> None:
    async def only_the_trial(server: FakeServer, body: dict[str, Any]) -> Answer:
        yield answer if len(server.bodies) > 1 else vector(4)

    report = bench(only_the_trial, *SMALL, code=1)
    assert (report["completed"], report["failed"], report["e2el_ms"]) == (0, 3, None)
    assert words in report["errors"][0]["error"]


def test_the_plot_of_embeddings_is_a_picture(bench: Any, tmp_path: Path) -> None:
    async def every_other(server: FakeServer, body: dict[str, Any]) -> Answer:
        yield whole(500, "no") if len(server.bodies) % 2 == 0 else vector(5)

    target = tmp_path / "run.png"
    bench(every_other, *SMALL, "--plot", str(target))
    assert target.read_bytes().startswith(b"\x89PNG\r\n")
    assert target.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--output-len", "4", "--temperature", "1"], "output_len, temperature"),
        (["--no-ignore-eos"], "ignore_eos"),
        (["--goodput", "ttft:5", "e2el:5"], "goodput ttft"),
    ],
)
def test_flags_of_generation_are_refused_before_anything_is_sent(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "serve", "--base-url", "http://127.0.0.1:9"]
    assert main([*command, "--backend", "openai-embeddings", *flags]) == 2
    assert f"openai-embeddings generates nothing: drop {named}\n" in capsys.readouterr().err
