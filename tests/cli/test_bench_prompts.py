"""What `penstock bench serve` sends, and which flags it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.bench.http import Address
from penstock.cli.bench.prompts import BenchRequest, prompts_from_args
from penstock.cli.main import build_parser, main
from penstock.protocol.errors import ConfigError


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
