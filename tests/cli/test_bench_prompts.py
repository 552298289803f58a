"""What `penstock bench serve` sends, and which flags it refuses."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.bench.http import Address
from penstock.cli.bench.prompts import BenchRequest, prompts_from_args
from penstock.cli.bench.streams import Dialect
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


def test_requests_have_random_images_and_videos() -> None:
    """Each item is of a size that was asked for, and no two are the same."""
    from penstock.media.decode import decode_image
    from penstock.media.video import Sampling, decode_video

    def size(part: dict[str, Any]) -> tuple[int, int, int]:
        kind = part["type"].removesuffix("_url")
        data = base64.b64decode(part[part["type"]]["url"].partition(",")[2])
        if kind == "image":
            image = decode_image(data, 10**6, {})
            return image.height, image.width, 1
        video = decode_video(data, Sampling(), False, lambda frame, _: None)
        return video.height, video.width, len(video.frames)

    drawn = prompts(
        "--dataset-name=random-mm",
        "--num-prompts=20",
        "--random-mm-base-items-per-request=2",
        "--random-mm-num-mm-items-range-ratio=0.5",
        '--random-mm-limit-mm-per-prompt={"video": 1}',
        "--random-mm-bucket-config={(16, 32, 1): 0.5, (32, 16, 4): 0.5, (9, 9, 1): 0}",
    )
    assert drawn.needs_chat
    assert {len(request.media) for request in drawn.requests} == {1, 2, 3}
    found = [[size(part) for part in request.media] for request in drawn.requests]
    assert {each for sizes in found for each in sizes} == {(16, 32, 1), (32, 16, 4)}
    assert all(sizes.count((32, 16, 4)) <= 1 for sizes in found)
    urls = [json.dumps(part) for request in drawn.requests for part in request.media]
    assert len(set(urls)) == len(urls)
    body = json.loads(Dialect("openai-chat", "m").body(drawn.requests[0]))
    (message,) = body["messages"]
    text = {"type": "text", "text": drawn.requests[0].text()}
    assert message["content"] == [*drawn.requests[0].media, text]


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
        (["--port", "80"], "drop --host and --port"),
        (["--dataset", "sharegpt"], "give --dataset-path"),
        (["--dataset", "conversations", "--num-prompts", "1"], "give --backend openai-chat"),
        (["--num-turns", "2"], "drop num_turns"),
        (["--random-mm-base-items-per-request", "2"], "drop random_mm_base_items_per_request"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (["--endpoint", "v1/x"], "endpoint must begin with /"),
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
        ["--metric-percentiles", "101"],
        ["--percentile-metrics", "speed"],
        ["--header", "x"],
        ["--random-mm-bucket-config", "{(9, 9): 1}"],
        ["--random-mm-bucket-config", "{(9, 9, 1): 0}"],
        ["--random-mm-bucket-config", "{(99999, 99999, 1): 1}"],
        ["--random-mm-limit-mm-per-prompt", '{"audio": 1}'],
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


def test_prompts_repeat_shared_prefixes() -> None:
    lengths = ("--prefix-repetition-prefix-len=20", "--prefix-repetition-suffix-len=5")
    flags = ("--dataset-name=prefix_repetition", "--prefix-repetition-num-prefixes=3", *lengths)
    drawn = prompts(*flags, "--num-prompts=12", "--prefix-repetition-output-len=4").requests
    assert len({tuple(request.prompt[:20]) for request in drawn}) == 3
    assert len({tuple(request.prompt) for request in drawn}) == 12
    assert {(len(request.prompt), request.output_len) for request in drawn} == {(25, 4)}
    shared = prompts("--num-prompts=3", "--random-prefix-len=7", "--random-input-len=2").requests
    assert len({tuple(request.prompt[:7]) for request in shared}) == 1
    assert {len(request.prompt) for request in shared} == {9}


def test_a_sharegpt_file_gives_first_turns_or_conversations(tmp_path: Path) -> None:
    def turns(*values: str) -> dict[str, Any]:
        senders = ("human", "gpt")
        return {
            "conversations": [
                {"from": senders[n % 2], "value": value} for n, value in enumerate(values)
            ]
        }

    path = tmp_path / "sharegpt.json"
    content = [turns("one", "x" * 40, "two", "y"), turns("alone"), turns("three", "z" * 8)]
    path.write_text(json.dumps(content))
    file = ("--dataset-path", str(path), "--num-prompts=2")
    first = prompts("--dataset=sharegpt", *file).requests
    assert set(first) == {BenchRequest("one", 10), BenchRequest("three", 2)}
    whole = prompts("--dataset=conversations", *file, "--sharegpt-output-len=5").requests
    assert set(whole) == {BenchRequest("one", 5, followups=("two",)), BenchRequest("three", 5)}
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds no conversations"):
        prompts("--dataset=sharegpt", *file)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="must look like"):
        prompts("--dataset=sharegpt", *file)
