"""The commands as a user runs them, on the real default model: each once in a process of its own,
and what else they do in this one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.main import main

PROMPT = "The capital of France is"
GREEDY = ("--temperature", "0", "--max-tokens", "8")
Here = Callable[..., str]


@pytest.fixture(scope="module")
def penstock(default_model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(default_model, tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="module")
def completion(penstock: Run) -> str:
    """What the model says to `PROMPT`, by the plainest of commands."""
    return penstock("generate", *GREEDY, PROMPT).stdout


class Run:
    """Runs `penstock` in a process of its own; `folder` is for its files."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model = model
        self.folder = folder

    def __call__(
        self, *arguments: str, stdin: str = "", code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *arguments, "--model", self.model],
            input=stdin,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return done


@pytest.fixture
def here(default_model: str, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs `penstock` in this process; what it writes to standard output."""

    def run(*arguments: str) -> str:
        assert main([*arguments, "--model", default_model]) == 0
        return capsys.readouterr().out

    return run


def test_generate_prints_the_text_alone_on_standard_output(completion: str) -> None:
    assert completion.startswith(" Paris")
    assert completion.endswith("\n")
    assert "Load" not in completion


def test_generate_reads_the_prompt_from_a_pipe(penstock: Run, completion: str) -> None:
    assert penstock("generate", *GREEDY, "-", stdin=PROMPT + "\n").stdout == completion


def test_generate_gives_one_completion_for_each_prompt(here: Here, completion: str) -> None:
    texts = here("generate", *GREEDY, PROMPT, "One, two, three, four,", PROMPT)
    assert texts.startswith(completion + " five,")
    assert texts.endswith("\n" + completion)


def test_generate_repeats_itself_for_a_seed(here: Here) -> None:
    flags = ("--temperature", "1.0", "--max-tokens", "16")
    first, again, other = (
        here("generate", "--seed", seed, *flags, PROMPT) for seed in ("7", "7", "8")
    )
    assert again == first
    assert other != first


def test_generate_takes_engine_options_from_a_file(
    penstock: Run, here: Here, completion: str
) -> None:
    config = penstock.folder / "engine.yaml"
    config.write_text("max-model-len: 4\n")
    done = penstock("generate", *GREEDY, "--config", str(config), PROMPT, code=2)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("penstock: error: ")
    longer = ("--config", str(config), "--max-model-len", "64")
    assert here("generate", *GREEDY, *longer, PROMPT) == completion


def test_a_model_that_is_not_there_is_one_line_of_error(tmp_path: Path) -> None:
    done = Run(str(tmp_path / "nothing.gguf"), tmp_path)("generate", PROMPT, code=1)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("penstock: error: ")
    assert "nothing.gguf" in done.stderr


def test_chat_answers_each_line_of_a_pipe_and_forgets_when_told(penstock: Run) -> None:
    question = "Write the numbers from one to five.\n"
    lines = f"{question}/help\n/reset\n{question}/exit\nx\n"
    done = penstock("chat", "--temperature", "0", "--max-tokens", "24", stdin=lines)
    middle = len(done.stdout) // 2
    first, second = done.stdout[:middle], done.stdout[middle:]
    assert len(first.split()) > 4
    assert second == first  # the conversation was forgotten, so the question was the same
    assert done.stderr.count("tokens/s]") == 2
    assert "/system TEXT" in done.stderr


def test_bench_throughput_reports_rates(penstock: Run) -> None:
    shape = ("--num-prompts", "2", "--input-len", "8", "--output-len", "4")
    done = penstock("bench", "throughput", *shape, "--json", "-")
    result = json.loads(done.stdout)
    assert (result["num_requests"], result["num_input_tokens"]) == (2, 16)
    assert result["num_output_tokens"] == 8
    assert result["output_tokens_per_s"] == pytest.approx(8 / result["elapsed_s"])
    assert "requests_per_s" in done.stderr


def test_bench_latency_reports_times(here: Here, tmp_path: Path) -> None:
    shape = ("--batch-size", "2", "--input-len", "8", "--output-len", "4", "--num-iters", "2")
    report = tmp_path / "report.json"
    table = here("bench", "latency", *shape, "--json", str(report))
    result = json.loads(report.read_text())
    assert 0 < result["time_to_first_token_ms"]["p50"] < result["total_ms"]["p50"]
    assert "ms_per_token" in table


def test_bench_counts_drafts(here: Here, tmp_path: Path) -> None:
    shape = ("--batch-size", "1", "--input-len", "32", "--output-len", "32", "--num-iters", "1")
    drafter = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    report = tmp_path / "report.json"
    speculation = ("--speculative-config", json.dumps(drafter))
    table = here("bench", "latency", *shape, *speculation, "--json", str(report))
    result = json.loads(report.read_text())
    assert 0 < result["num_drafts"] <= result["num_draft_tokens"]
    accepted = result["num_accepted_tokens"] / result["num_drafts"]
    assert result["mean_acceptance_length"] == 1 + accepted
    assert "mean_acceptance_length" in table


def test_bench_startup_says_where_the_time_went(penstock: Run) -> None:
    flags = ("--num-iters", "1", "--num-iters-warmup", "0")
    result = json.loads(penstock("bench", "startup", *flags, "--json", "-").stdout)
    parts = result["import_s"] + result["load_s"] + result["generate_s"]
    assert 0 < parts < result["first_token_s"]
