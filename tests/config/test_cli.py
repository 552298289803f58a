"""Flags, the YAML file, and which of them wins."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config.cli import (
    add_engine_arguments,
    add_sampling_arguments,
    add_server_arguments,
    engine_options_from_args,
    override,
    sampling_options_from_args,
    serve_options_from_args,
)
from penstock.config.engine import EngineConfig, all_options
from penstock.config.sampling import sampling_options
from penstock.protocol.errors import ConfigError, InputError
from penstock.protocol.sampling import SamplingParams


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_engine_arguments(parser)
    add_sampling_arguments(parser, max_tokens=128)
    return parser.parse_args(flags)


def engine_options(*flags: str) -> dict[str, Any]:
    return engine_options_from_args(parse(*flags))


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "engine.yaml"


def test_only_what_was_given_is_passed_on() -> None:
    assert engine_options() == {}
    assert engine_options("--max-model-len", "512") == {"max_model_len": 512}


def test_every_engine_option_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    known = parser.format_help()
    for section in all_options().values():
        for option in section:
            assert f"  {option.flag}" in known


def test_flags_have_the_types_of_their_options() -> None:
    assert engine_options(
        "--no-enable-prefix-caching",
        "--async-scheduling",
        "--kv-cache-memory-bytes=4GiB",
        "--gpu-memory-utilization=0.5",
        "--dtype=bfloat16",
        "--served-model-name=a",
        "--served-model-name=b",
    ) == {
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "kv_cache_memory_bytes": 4 * 2**30,
        "gpu_memory_utilization": 0.5,
        "dtype": "bfloat16",
        "served_model_name": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--max-model-len", "long"], "must be a whole number such as 4096, 8k or 8K, got 'long'"),
        (["--kv-cache-memory-bytes", "lots"], "must be a size such as 4GiB, got 'lots'"),
        (["--logit-bias", "{1: 2}"], 'must be JSON such as {"42": -100}'),
        (["--logit-bias", '{"a": 2}'], "logit_bias must be JSON"),
    ],
)
def test_a_bad_value_is_named_with_its_flag(flags: list[str], message: str) -> None:
    with pytest.raises(argparse.ArgumentError) as caught:
        parse(*flags)
    assert message in str(caught.value)
    assert flags[0] in str(caught.value)


def test_impossible_combinations_are_refused_before_an_engine_is_made() -> None:
    with pytest.raises(ConfigError, match="cannot be combined"):
        engine_options("--skip-tokenizer-init", "--tokenizer", "x")


def test_the_file_gives_options_and_flags_win(yaml_file: Path) -> None:
    yaml_file.write_text("max-model-len: 512\nmax_num_seqs: 8\nkv_cache_memory_bytes: 1GiB\n")
    assert engine_options("--config", str(yaml_file), "--max-num-seqs", "2") == {
        "max_model_len": 512,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": 2**30,
    }


def test_the_file_of_a_server_is_told_the_servers_nearest_option(yaml_file: Path) -> None:
    yaml_file.write_text("max-conections: 5\n")
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    add_server_arguments(parser)
    args = parser.parse_args(["--config", str(yaml_file)])
    with pytest.raises(ConfigError, match="'max-conections'; did you mean 'max_connections'"):
        serve_options_from_args(args)


def test_a_command_with_a_few_of_the_servers_options_has_them_in_the_file_too(
    yaml_file: Path,
) -> None:
    own = ("lora_modules", "lora_resolver")
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    add_server_arguments(parser, several=own, only=own)
    folder = str(yaml_file.parent)
    yaml_file.write_text(f"lora-modules: [a=/a]\nlora_resolver: ['{folder}']\nmax_loras: 2\n")
    args = parser.parse_args(["--config", str(yaml_file), "--lora-modules", "b=/b"])
    config, server = serve_options_from_args(args, only=own)
    assert config.lora.max_loras == 2
    assert server.lora_modules == ["b=/b"]  # flags win
    assert server.lora_resolver == [folder]
    yaml_file.write_text("port: 80\n")
    with pytest.raises(ConfigError, match="unknown option 'port'"):
        serve_options_from_args(args, only=own)


def test_an_empty_file_gives_nothing(yaml_file: Path) -> None:
    yaml_file.write_text("# all defaults\n")
    assert engine_options("--config", str(yaml_file)) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-modle-len: 5", "unknown option 'max-modle-len'; did you mean 'max_model_len'?"),
        ("temperature: 0.5", "unknown option 'temperature'"),
        (
            "max-model-len: long",
            "max_model_len must be a whole number such as 4096, 8k or 8K, got 'long'",
        ),
        ("max-model-len: 5\nmax_model_len: 6", "max_model_len is given twice"),
        ("block_size:", "block_size must be int, got None"),
        ("- block_size", "must map option names to values"),
        ("a: [1, 2", "is not valid YAML"),
        ("a: \x00", "is not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_what_is_wrong_with_the_file_is_said_with_its_name(
    yaml_file: Path, content: str, message: str
) -> None:
    yaml_file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        engine_options("--config", str(yaml_file))
    assert message in str(caught.value)
    assert str(yaml_file) in str(caught.value)


def test_a_missing_file_is_said_with_its_name(yaml_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*engine\.yaml: No such file"):
        engine_options("--config", str(yaml_file))


def test_sampling_flags_become_sampling_parameters() -> None:
    args = parse(
        "--temperature=0.5",
        "--top-k=5",
        "--stop=.",
        "--stop=\n",
        "--stop-token-ids=7",
        "--ignore-eos",
        "--presence-penalty=-1",
        '--logit-bias={"42": -100, "7": 1.5}',
    )
    assert sampling_options_from_args(args) == {
        "temperature": 0.5,
        "top_k": 5,
        "stop": [".", "\n"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "presence_penalty": -1.0,
        "logit_bias": {42: -100.0, 7: 1.5},
        "max_tokens": 128,
    }


def test_seed_is_the_engines_and_the_requests() -> None:
    args = parse("--seed", "3")
    assert engine_options_from_args(args) == {"seed": 3}
    assert sampling_options_from_args(args)["seed"] == 3


def test_no_other_name_means_both_an_engine_option_and_a_sampling_parameter() -> None:
    engine = {option.name for section in all_options().values() for option in section}
    assert engine & {option.name for option in sampling_options()} == {"seed"}


def test_senseless_sampling_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="temperature must be at least 0"):
        sampling_options_from_args(parse("--temperature", "-1"))


def test_given_parameters_replace_the_models_and_leave_the_rest() -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.9)
    assert override(defaults, {"temperature": 0.0}) == SamplingParams(temperature=0.0, top_p=0.9)


def test_every_sampling_parameter_is_described_by_its_docstring() -> None:
    described = {option.name: option for option in sampling_options()}
    assert set(described) == {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert described["n"].help == "Number of completions for the prompt."
    assert described["logprobs"].help.endswith("in addition to the sampled one; -1: all.")
    assert described["stop"].is_list
    assert described["stop"].optional


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("8k", 8000), ("8K", 8192), ("1.5m", 1_500_000), ("1.5K", 1536)],
)
def test_counts_may_have_units(text: str, value: int) -> None:
    assert engine_options("--max-model-len", text) == {"max_model_len": value}


def test_counts_may_have_units_in_the_file_too(yaml_file: Path) -> None:
    yaml_file.write_text("max-model-len: 8k\nmax-num-seqs: 12\n")
    options = engine_options("--config", str(yaml_file))
    assert options == {"max_model_len": 8000, "max_num_seqs": 12}
    yaml_file.write_text("max-num-seqs: many\n")
    with pytest.raises(ConfigError, match="a whole number such as 4096, 8k or 8K, got 'many'"):
        engine_options("--config", str(yaml_file))


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_the_length_that_fits_is_the_default(text: str) -> None:
    options = engine_options("--max-model-len", text)
    assert EngineConfig.from_options(options).model.max_model_len is None


def test_lists_may_be_json() -> None:
    names = ["--served-model-name", '["a", "b"]', "--served-model-name", "c"]
    assert engine_options(*names) == {"served_model_name": ["a", "b", "c"]}
