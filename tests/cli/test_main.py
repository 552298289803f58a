"""Errors become one line on standard error and an exit code."""

from __future__ import annotations

import errno
import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli import collect_env
from penstock.cli.common import read_prompts, take_model_argument
from penstock.cli.main import build_parser, main
from penstock.protocol.errors import (
    ConfigError,
    EngineDeadError,
    InputError,
    ModelError,
    PenstockError,
    RequestFault,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["generat"], "invalid choice: 'generat'"),
        (["merge"], "the following arguments are required: MODEL"),
        (["generate", "--max-model-len", "x", "p"], "max_model_len must be a whole number"),
        (["generate", "p", "--max-modle-len=5"], "did you mean --max-model-len?"),
        (["generate", "p", "--max-model", "5"], "unrecognized arguments: --max-model 5"),
        (["serve", "--served-model-name", "a", "b"], "or the model: give the model before it"),
        (["serve", "--served-model-name", "a", "b", "c"], "of --served-model-name may be one"),
        (["bench", "latency", "--num-iters", "0"], "must be at least 1, got 0"),
        (["bench", "latency", "--workload", "thrr"], "invalid choice: 'thrr'"),
        (["bench", "throughput", "--dataset-name", "random"], "name random; use bench serve: this"),
    ],
)
def test_usage_errors_are_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "p", "--block-size", "3"], "block_size must be a power of two"),
        (["generate", "p", "--temperature", "-1"], "temperature must be at least 0"),
        (["generate", "p", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["generate", "p", "--skip-tokenizer-init"], "drop --skip-tokenizer-init"),
        (["generate", "-", "-"], "standard input and can be given once"),
        (["generate", "p", "--config", "no/such.yaml"], "cannot read no/such.yaml"),
        (["chat", "--n", "2"], "one answer at a time, got n=2"),
        (
            ["bench", "throughput", "--workload", "nano", "--input-len", "5"],
            "workload nano fixes lengths and counts: drop input_len",
        ),
    ],
)
def test_what_cannot_work_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("penstock: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a\nb"), 2),
        (InputError("a\nb", "prompt"), 2),
        (ModelError("a\nb"), 1),
        (RequestFault("a\nb"), 1),
        (EngineDeadError("a\nb"), 1),
    ],
)
def test_each_kind_of_error_has_its_code(
    error: PenstockError,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(collect_env, "collect", lambda: _raise(error))
    assert main(["collect-env"]) == code
    assert capsys.readouterr().err == "penstock: error: a b\n"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "x.json: No space left on device; free some space"),
        (errno.EADDRINUSE, "choose another --port"),
    ],
)
def test_errors_of_the_system_come_with_advice(
    number: int,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = OSError(number, os.strerror(number), "x.json")
    monkeypatch.setattr(collect_env, "collect", lambda: _raise(error))
    assert main(["collect-env"]) == 1
    assert advice in capsys.readouterr().err


def test_a_refused_connection_says_how_to_start_a_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert main(["complete", "--url", url, "a"]) == 1
    assert f"no server answers at {url}/v1/models: start one with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--served-model-name", "a", "b"],
        ["--model", "m", "--served-model-name", "a", "b"],
        ["--served-model-name", "a", "--served-model-name", "b", "--port", "1", "m"],
        ["m", "--served-model-name=a", "--served-model-name=b"],
    ],
    ids=" ".join,
)
def test_a_model_may_be_served_under_several_names(arguments: list[str]) -> None:
    args = build_parser().parse_args(["serve", *arguments])
    take_model_argument(args)
    assert args.model == "m"
    assert args.served_model_name == ["a", "b"]


def test_debug_logging_shows_the_traceback() -> None:
    with pytest.raises(ConfigError):
        main(["generate", "p", "--block-size", "3", "--log-level", "debug"])


def test_an_interrupt_is_quiet_and_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collect_env, "collect", lambda: _raise(KeyboardInterrupt()))
    assert main(["collect-env"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_is_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "collect-env", "--json"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert done.returncode == 1
    assert done.stderr == ""


def test_streams_that_the_caller_closed_are_opened_again() -> None:
    code = (
        "import os, sys\n"
        "from penstock.cli.main import main\n"
        "assert (sys.stdin, sys.stdout, sys.stderr) == (None, None, None)\n"
        "assert main(['generate', '-', '-']) == 2\n"
        "assert [s.fileno() for s in (sys.stdin, sys.stdout, sys.stderr)] == [0, 1, 2]\n"
        "os._exit(7)\n"
    )
    closing = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(closing).returncode == 7


@pytest.mark.parametrize(
    ("name", "expected", "missing"),
    [
        ("max-num-seqs", {"--max-num-seqs"}, "--port"),
        ("max_model", {"--max-model-len"}, "--max-num-seqs"),
        ("SchedulerConfig", {"--max-num-seqs", "--scheduling-policy"}, "--port"),
        ("unheard-of", {"--max-num-seqs", "--port"}, "unheard"),
    ],
)
def test_help_may_be_about_one_flag_or_section(
    name: str, expected: set[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", f"--help={name}"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert expected <= set(shown.split())
    assert missing not in shown


def test_q_is_quick_in_a_chat_and_the_quantization_elsewhere() -> None:
    assert build_parser().parse_args(["chat", "-q", "hi"]).quick == "hi"
    assert build_parser().parse_args(["serve", "-q", "fp8"]).quantization == "fp8"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_the_version_is_the_one_that_is_packaged() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert f'\nversion = "{penstock.__version__}"\n' in pyproject.read_text()


def test_a_dash_stands_for_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n\n"))
    assert read_prompts(["a", "-", "b"]) == ["a", "from a pipe\n", "b"]


def test_without_a_prompt_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.StringIO("from a pipe\n")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert read_prompts([]) == ["from a pipe"]
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    with pytest.raises(InputError, match="give a PROMPT, or send one to standard input"):
        read_prompts([])


def _raise(error: BaseException) -> None:
    raise error
