"""What an engine's configuration takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.engine import EngineConfig, all_options
from penstock.config.options import parse_bytes
from penstock.protocol.errors import ConfigError


def test_no_options_give_the_declared_defaults() -> None:
    assert EngineConfig.from_options({}) == EngineConfig()


def test_every_option_has_one_section_and_a_help_text() -> None:
    options = [option for section in all_options().values() for option in section]
    names = [option.name for option in options]
    assert len(set(names)) == len(names)
    assert all(option.help.endswith(".") for option in options)


def test_every_declared_default_is_accepted_as_a_value() -> None:
    values = {
        option.name: option.default for section in all_options().values() for option in section
    }
    assert EngineConfig.from_options(values) == EngineConfig()


def test_options_reach_their_sections() -> None:
    config = EngineConfig.from_options(
        {
            "model": Path("some/folder"),
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": "2GiB",
            "gpu_memory_utilization": 1,
            "served_model_name": "one",
        }
    )
    assert config.model.model == "some/folder"
    assert config.scheduler.max_num_seqs == 4
    assert config.cache.kv_cache_memory_bytes == 2 * 2**30
    assert config.cache.gpu_memory_utilization == 1.0
    assert config.model.served_model_name == ["one"]


def test_host_memory_holds_as_many_adapters_as_there_are_slots_or_as_many_as_asked() -> None:
    assert EngineConfig.from_options({"max_loras": 3}).lora.num_host_adapters == 3
    options = {"max_loras": 3, "max_cpu_loras": 200}
    assert EngineConfig.from_options(options).lora.num_host_adapters == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 24}, "block_size must be a power of two from 1 to 256, got 24"),
        ({"max_model_len": "many"}, "max_model_len must be int, got 'many'"),
        ({"max_model_len": True}, "max_model_len must be int, got True"),
        (
            {"dtype": "float8"},
            "dtype must be one of auto, float32, float, bfloat16, float16, half, got 'float8'",
        ),
        ({"max_loras": 0}, "max_loras must be at least 1, got 0"),
        ({"max_lora_rank": 0}, "max_lora_rank must be at least 1, got 0"),
        ({"max_lora_rank": 513}, "max_lora_rank must be at most 512, got 513"),
        (
            {"max_loras": 4, "max_cpu_loras": 3},
            r"max_cpu_loras must be at least max_loras \(4\): the adapters of running requests "
            "stay in host memory, got 3",
        ),
        (
            {"lora_dtype": "int8"},
            "lora_dtype must be one of auto, float32, bfloat16, float16, got 'int8'",
        ),
        ({"cpu_threads": 0}, "cpu_threads must be from 1 to 1024, got 0"),
        ({"cpu_threads": 10**12}, "cpu_threads must be from 1 to 1024, got 1000000000000"),
        ({"block_size": None}, "block_size must be int, got None"),
        ({"served_model_name": 3}, "served_model_name must be a list, got 3"),
        ({"max_modle_len": 5}, "unknown option 'max_modle_len'; did you mean 'max_model_len'?"),
        ({"zzz": 5}, "unknown option 'zzz'"),
        ({"num_gpu_blocks_override": 1}, "must be at least 2"),
        ({"gpu_memory_utilization": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        ({"model": ""}, "model must name a folder"),
        (
            {"skip_tokenizer_init": True, "tokenizer": "x"},
            "skip_tokenizer_init and tokenizer cannot be combined",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 8, "max_model_len": 16},
            r"max_num_batched_tokens \(8\) must be at least max_model_len \(16\)",
        ),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 8},
            "needs enable_chunked_prefill",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_name_and_the_remedy(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        EngineConfig.from_options(options)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 2**20),
        ("4GiB", 4 * 2**30),
        ("4GB", 4 * 2**30),
        ("500M", 500 * 2**20),
        (" 1.5 k ", 1536),
        ("1tib", 2**40),
        ("12b", 12),
    ],
)
def test_sizes_may_carry_units(text: str, size: int) -> None:
    assert parse_bytes("kv_cache_memory_bytes", text) == size


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    for name in ("queue_timeout_s", "structured_outputs_timeout_s"):
        with pytest.raises(ConfigError, match=f"{name} must be a finite number, got {value}"):
            EngineConfig.from_options({name: value})


@pytest.mark.parametrize("text", ["", "GiB", "four", "4XiB", "nan", "inf"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes must be a size such as 4GiB"):
        parse_bytes("kv_cache_memory_bytes", text)
