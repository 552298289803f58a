"""The keys of `speculative_config`, and flags for single keys."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from penstock.config import EngineConfig, SpeculativeSettings
from penstock.config.cli import (
    add_engine_arguments,
    engine_options_from_args,
    expand_dotted_flags,
)
from penstock.protocol.errors import ConfigError


def settings(**keys: Any) -> SpeculativeSettings:
    config = EngineConfig.from_options({"speculative_config": keys})
    assert config.speculative.settings is not None
    return config.speculative.settings


def test_there_is_no_speculation_unless_asked_for() -> None:
    assert EngineConfig().speculative.settings is None


def test_a_method_alone_is_enough() -> None:
    assert settings(method="ngram").num_tokens == 5
    assert settings(method="ngram", num_speculative_tokens=2).num_tokens == 2


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_min": 3}, (3, 5)),
        ({"prompt_lookup_min": 8}, (8, 8)),
        ({"prompt_lookup_max": 9}, (2, 9)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 4}, (4, 4)),
    ],
)
def test_one_bound_of_the_lookup_moves_the_other(
    keys: dict[str, Any], lengths: tuple[int, int]
) -> None:
    found = settings(method="ngram", **keys)
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == lengths


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "method is missing: choose one of ngram"),
        ({"method": "n-gram"}, "method must be one of ngram, .*, got 'n-gram'"),
        ({"method": ["ngram"]}, "method must be one of ngram"),
        ({"method": None}, "method must be one of ngram"),
        ({"metod": "ngram"}, "unknown key 'metod'; did you mean 'method'"),
        (
            {"method": "ngram", "disable_by_batch_size": 8},
            "disable_by_batch_size is not a key: drop it; adaptive turns drafts down under load",
        ),
        (
            {"method": "draft_model", "model": "x", "tensor_parallel_size": 2},
            "tensor_parallel_size is not a key: use draft_tensor_parallel_size",
        ),
        ({"method": "deepseek_mtp"}, "method deepseek_mtp is called mtp here"),
        ({"method": "ngram_gpu"}, "method ngram_gpu is called ngram here"),
        ({"method": "ngram", "zzz": 1}, "unknown key 'zzz'; keys: method, num_speculative_tokens"),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "num_speculative_tokens must be at least 1, got 0",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 65},
            "num_speculative_tokens must be at most 64, got 65",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": "5"},
            "num_speculative_tokens must be int, got '5'",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": True},
            "num_speculative_tokens must be int, got True",
        ),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min must be at least 1"),
        ({"method": "ngram", "prompt_lookup_max": 33}, "prompt_lookup_max must be at most 32"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            r"prompt_lookup_min \(4\) must be at most prompt_lookup_max \(3\)",
        ),
        (
            {"method": "ngram", "model": "a:B"},
            "model is for method draft_model, .*, custom, got method ngram: drop model",
        ),
        (
            {"method": "custom", "model": "a:B", "prompt_lookup_max": 3},
            "prompt_lookup_max is for method ngram, got method custom: drop prompt_lookup_max",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 1},
            "suffix_decoding_max_tree_depth must be from 2 to 256, got 1",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_cached_requests": -1},
            "suffix_decoding_max_cached_requests must be at least 0, got -1",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_spec_factor": 0},
            "suffix_decoding_max_spec_factor must be above 0, got 0",
        ),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 1.5},
            "suffix_decoding_min_token_prob must be from 0 to 1, got 1.5",
        ),
        (
            {"method": "ngram", "suffix_decoding_min_token_prob": 0.2},
            "suffix_decoding_min_token_prob is for method suffix, got method ngram",
        ),
        ({"method": "draft_model"}, "method draft_model needs model: a smaller model"),
        (
            {"method": "draft_model", "model": "x", "quantization": "int7"},
            "quantization must be one of fp8",
        ),
        ({"method": "medusa"}, "method medusa needs model: heads that were trained"),
        (
            {"method": "mtp", "draft_tensor_parallel_size": 1},
            "draft_tensor_parallel_size is for method draft_model, .*, got method mtp",
        ),
        ({"method": "custom"}, 'method custom needs model: "module:Class" of a drafter'),
    ],
)
def test_what_cannot_work_is_refused_with_the_key_and_the_remedy(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^speculative_config: {message}"):
        settings(**keys)


@pytest.mark.parametrize(
    ("ranks", "size", "message"),
    [
        (4, 2, "draft_tensor_parallel_size must be 1 or 4, the tensor_parallel_size, got 2"),
        (1, 2, "draft_tensor_parallel_size must be 1, got 2"),
        (4, 0, "draft_tensor_parallel_size must be 1 or 4, the tensor_parallel_size, got 0"),
    ],
)
def test_a_drafter_has_all_ranks_or_each_has_a_drafter(ranks: int, size: int, message: str) -> None:
    keys = {"method": "draft_model", "model": "x", "draft_tensor_parallel_size": size}
    with pytest.raises(ConfigError, match=f"^speculative_config: {message}$"):
        EngineConfig.from_options({"speculative_config": keys, "tensor_parallel_size": ranks})
    for right in (1, ranks):
        keys["draft_tensor_parallel_size"] = right
        EngineConfig.from_options({"speculative_config": keys, "tensor_parallel_size": ranks})


def options(*flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_engine_arguments(parser)
    return engine_options_from_args(parser.parse_args(expand_dotted_flags(flags)))


def test_keys_have_flags_of_their_own_which_join_the_whole_option() -> None:
    expected = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    whole = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert options("--speculative-config", whole) == expected
    flags = ("--speculative-config.method", "ngram")
    assert options(*flags, "--speculative-config.num_speculative_tokens=3") == expected
    other = '{"method": "custom", "num_speculative_tokens": 3}'
    assert options("--speculative-config", other, *flags) == expected


def test_values_of_keys_are_json_or_else_text() -> None:
    flags = ("--hf-overrides.a", "1.5", "--hf-overrides.b", "true", "--hf-overrides.c=x.y=z")
    assert options(*flags) == {"hf_overrides": {"a": 1.5, "b": True, "c": "x.y=z"}}
    assert options("--pooler-config.pooling_type", "MEAN") == {
        "pooler_config": {"pooling_type": "MEAN"}
    }


def test_a_key_without_a_value_is_refused() -> None:
    for flags in (["--hf-overrides.a"], ["--hf-overrides.a", "--seed", "1"]):
        with pytest.raises(ConfigError, match=r"argument --hf-overrides\.a: expected a value"):
            expand_dotted_flags(flags)


def test_other_arguments_stay_as_they_are() -> None:
    given = ["generate", "a.b", "--max-model-len", "5", "--x.y", "1", "--", "--hf-overrides.a", "1"]
    assert expand_dotted_flags(given) == given
