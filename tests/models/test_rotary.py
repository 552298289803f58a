"""Rotary frequencies equal transformers' for every way of stretching them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.layers.rotary import rotary_frequencies, rotary_parameters
from penstock.protocol.errors import ModelError

ORIGINAL = {"original_max_position_embeddings": 1024}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2, **ORIGINAL},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.9, "truncate": False, **ORIGINAL},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_frequencies_equal_transformers(scaling: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 50000.0, **scaling},
    )
    config.standardize_rope_params()
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    parameters = rotary_parameters({"rope_theta": 50000.0, "rope_scaling": scaling})
    ours, our_factor = rotary_frequencies(128, parameters, 4096, 4096)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor)


def test_old_and_new_spelling_mean_the_same() -> None:
    old = rotary_parameters({"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = rotary_parameters(
        {"rope_parameters": {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}}
    )
    assert (old["rope_type"], old["rope_theta"]) == (new["rope_type"], new["rope_theta"])


def test_dynamic_scaling_equals_transformers_for_a_sequence_that_ends_at_each_position() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters=scaling,
    )
    config.standardize_rope_params()
    ours, _ = rotary_frequencies(64, rotary_parameters({"rope_scaling": scaling}), 512, 1024)
    for position in (0, 511, 512, 800, 1023):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), position + 1)
        torch.testing.assert_close(ours[position], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [1024, 1025])
def test_longrope_uses_the_long_factors_where_sequences_may_be_long(length: int) -> None:
    scaling = {
        "short_factor": [1.0 + index / 10 for index in range(24)],
        "long_factor": [1.0 + index for index in range(24)],
    }
    file = {"original_max_position_embeddings": 1024, "partial_rotary_factor": 0.75}
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 4096}
    rope = {"rope_type": "longrope", **scaling}
    config = Phi3Config(**sizes, **file, pad_token_id=0, rope_scaling=rope)
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), length)
    for kind in ("longrope", "su", "yarn"):  # the older files' names
        parameters = rotary_parameters({**file, "rope_scaling": {"type": kind, **scaling}})
        ours, our_factor = rotary_frequencies(48, parameters, 4096, length)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
        assert our_factor == pytest.approx(factor)


def test_longrope_without_its_factors_is_refused() -> None:
    parameters = rotary_parameters({"rope_scaling": {"type": "su", "short_factor": [1.0]}})
    with pytest.raises(ModelError, match=r"needs short_factor, a list of 4 positive numbers"):
        rotary_frequencies(8, parameters, 64, 64)


def test_ntk_scaling_is_that_of_gtes_encoders() -> None:
    """transformers has it not: a base times the factor, then each angle less by factor^(2/dim)."""
    scaling = {"type": "ntk", "factor": 8.0}
    parameters = rotary_parameters({"rope_theta": 20000.0, "rope_scaling": scaling})
    found, attention_factor = rotary_frequencies(64, parameters, 8192, 8192)
    expected = [160000.0 ** -(pair / 32) * 8.0 ** -(1 / 32) for pair in range(32)]
    torch.testing.assert_close(found, torch.tensor(expected))
    assert attention_factor == 1.0


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'cubic' is not supported; supported: default"):
        rotary_parameters({"rope_scaling": {"rope_type": "cubic"}})
