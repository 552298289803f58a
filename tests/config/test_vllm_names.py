"""Options of vLLM: each is ours too, or we say what to do about it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config import EngineConfig, ServerConfig
from penstock.config.docs import render_vllm_methods, render_vllm_names
from penstock.config.engine import all_options
from penstock.config.eplb import EplbSettings
from penstock.config.hints import hint_for
from penstock.config.options import options_of
from penstock.config.vllm_names import (
    NOT_NEEDED,
    NOT_SUPPORTED,
    SHORT_FLAGS,
    find_foreign,
    leave_out_foreign,
)
from penstock.protocol.errors import ConfigError

LISTED = (Path(__file__).parent / "vllm_serve_flags.txt").read_text()
THEIRS = [
    flag.replace("-", "_")
    for line in LISTED.splitlines()
    if not line.startswith("#")
    for flag in line.split()
]
OURS = {item.name for section in all_options().values() for item in section} | {
    item.name for item in options_of(ServerConfig)
}


@pytest.mark.parametrize("name", THEIRS)
def test_every_option_of_vllm_is_ours_or_in_the_table(name: str) -> None:
    assert (name in OURS) + (name in NOT_NEEDED) + (name in NOT_SUPPORTED) == 1


def test_the_migration_page_shows_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "moving-from-vllm.md"
    assert render_vllm_names() in page.read_text(), "run: python -m penstock.config.docs vllm"
    methods = render_vllm_methods()
    assert methods in page.read_text(), "run: python -m penstock.config.docs vllm-methods"


def test_the_table_has_no_option_of_ours() -> None:
    assert not OURS & (NOT_NEEDED.keys() | NOT_SUPPORTED.keys())
    assert set(SHORT_FLAGS.values()) <= OURS | NOT_NEEDED.keys() | NOT_SUPPORTED.keys()


def test_values_that_ask_for_nothing_are_accepted() -> None:
    config = EngineConfig.from_options(
        {
            "trust_remote_code": False,
            "enable_sleep_mode": False,
            "cpu_offload_gb": 0,
            "tokenizer_mode": "auto",
            "max_num_seqs": 7,
        }
    )
    assert config.scheduler.max_num_seqs == 7


def test_what_is_not_needed_is_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert leave_out_foreign({"swap_space": 4, "seed": 1}) == {"seed": 1}
    assert caplog.messages == [
        "swap_space is ignored: preempted requests are recomputed, not swapped"
    ]


def test_what_is_not_supported_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="trust_remote_code is not supported: Penstock runs no"):
        EngineConfig.from_options({"trust_remote_code": True})


def test_a_file_may_hold_vllms_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("swap-space: 4\nenable-sleep-mode: true\n")
    assert main(["serve", "--config", str(tmp_path / "a.yaml")]) == 2
    assert "enable-sleep-mode is not supported: stop the server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trust-remote-code"], "--trust-remote-code is not supported: Penstock runs no code"),
        (["-pp", "0"], "pipeline_parallel_size must be at least 1"),
        (["--swap-space", "4", "--enable-sleep-mode"], "--enable-sleep-mode is not supported"),
        (["--compilation-config.level", "3", "--grpc"], "--grpc is not supported: use HTTP"),
        (["--no-trust-remote-code", "-O3", "-tp", "0"], "tensor_parallel_size must be at least 1"),
        (["-cc", "{}", "-ep", "-asc", "0"], "api_server_count must be from 1 to 64"),
        (["-dpl", "4", "-sc", "{}"], "--data-parallel-size-local is not supported: use data_par"),
    ],
)
def test_flags_are_answered_from_the_table(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err


# Names of other engines' options that are like some of ours, and mean something else.
OTHERS = [
    "disable-radix-cache",
    "attention-options",
    "enable-log-stats",
    "disable-prefix-caching",
    "mem-fraction-static",
    "chunked-prefill-size",
    "max-running-requests",
    "max-total-tokens",
    "disable-cuda-graph",
    "max-batch-size",
    "max-input-length",
    "quantize",
    "num-shard",
    "sharded",
    "max-best-of",
    "disable-logprobs-mode",
    "kv-cache-config",
    "generation-backend",
    "tool-parser-config",
    "media-cache-config",
    "tensor-cache-size",
]


@pytest.mark.parametrize("name", OTHERS)
def test_no_name_is_suggested_that_means_something_else(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", f"--{name}"])
    assert "did you mean" not in capsys.readouterr().err
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options({name.replace("-", "_"): 1})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", THEIRS)
def test_no_option_of_vllm_is_guessed_at(name: str) -> None:
    hint = hint_for(f"--{name.replace('_', '-')}", OURS)
    assert hint == (find_foreign(name).text if name not in OURS else f"did you mean {name!r}?")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_modle_len", "max_model_len"),
        ("--max-model-length", "max_model_len"),
        ("max-num-seq", "max_num_seqs"),
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
    ],
)
def test_a_misspelling_is_answered_with_the_name(given: str, meant: str) -> None:
    assert hint_for(given, OURS) == f"did you mean {meant!r}?"


def test_keys_of_options_are_answered_from_the_table() -> None:
    given = {"method": "ngram", "rejection_sample_method": "standard", "revision": None}
    assert EngineConfig.from_options({"speculative_config": given}).speculative.settings
    with pytest.raises(ConfigError, match="use_async is not a key: drop it; layers take turns"):
        EplbSettings.parse({"use_async": "always"})
    with pytest.raises(ConfigError, match="unknown key 'windows_size'; did you mean 'window_size'"):
        EplbSettings.parse({"windows_size": 3})
    with pytest.raises(ConfigError, match="unknown key 'balance'; keys: num_redundant_experts"):
        EplbSettings.parse({"balance": 3})


def test_a_group_of_options_may_ask_for_nothing() -> None:
    options = {"structured_outputs_config": {"backend": "auto"}, "attention_config": {}}
    assert EngineConfig.from_options(options) == EngineConfig()
    with pytest.raises(ConfigError, match="structured_outputs_config is not supported: use"):
        EngineConfig.from_options({"structured_outputs_config": {"backend": "outlines"}})
