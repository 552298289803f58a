"""Patterns that come with a checkpoint cannot keep a load from ending."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from penstock.layers.quantization import DenseMethod
from penstock.layers.quantized.checkpoints import choose_quantization
from penstock.layers.quantized.patterns import (
    MAX_EXPRESSIONS,
    Expression,
    find_expressions,
    try_expressions,
)
from penstock.layers.quantized.plan import assign_methods
from penstock.protocol.errors import ModelError

NAMES = ["model.layers.0.self_attn.q_proj", "a" * 60 + ".", "model.layers.11.mlp.gate"]
CATASTROPHIC = [r"(a+)+$", pytest.param(r".*.*.*.*.*.*.*.*z", marks=pytest.mark.slow)]
# As they are found in published checkpoints, and more.
ORDINARY = [
    r".*lm_head",
    r".*self_attn.*",
    r".*mlp\.gate$",
    r"^lm_head$",
    r"model\.layers\.(?:[0-9]|1[0-9])\.self_attn\.(q|k|v|o)_proj$",
    r".*\.layers\.\d+\.block_sparse_moe\.gate",
    r"^(?!.*\.experts\.).*",
    r".*layers.*mlp.*experts.*gate_proj.*",
    r"(?i).*vision.*",
    r".*\.(up|gate|down)_proj.*",
    "|".join(rf"model\.layers\.{i}\..*" for i in range(64)),
]


@pytest.mark.parametrize("pattern", CATASTROPHIC)
def test_patterns_that_take_forever_are_refused(pattern: str) -> None:
    with pytest.raises(ModelError, match=r"some field has the pattern .* too long to match"):
        try_expressions([Expression("some field", pattern)], NAMES)


def test_ordinary_patterns_are_not() -> None:
    try_expressions([Expression("some field", pattern) for pattern in ORDINARY], NAMES)


def test_more_patterns_than_anyone_needs_are_refused() -> None:
    many = [Expression("ignore", f"a{i}") for i in range(MAX_EXPRESSIONS + 1)]
    with pytest.raises(ModelError, match=f"has {len(many)} patterns"):
        try_expressions(many, NAMES)


GROUP = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("ignore", {"quant_method": "compressed-tensors", "ignore": ["re:("]}),
        (
            "targets",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {**GROUP, "targets": ["re:("]}},
            },
        ),
        ("dynamic", {"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}),
        ("modules_to_not_convert", {"quant_method": "awq", "modules_to_not_convert": ["re:("]}),
        ("ignored_layers", {"quant_method": "fp8", "ignored_layers": ["re:("]}),
        (
            "exclude_modules",
            {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["re:("]},
        ),
    ],
)
def test_the_field_that_has_one_is_named(field: str, config: dict[str, Any]) -> None:
    found = choose_quantization({"quantization_config": config}, None)
    assert found is not None
    with pytest.raises(ModelError, match=f"quantization_config's {field} has the pattern"):
        try_expressions(found.expressions, NAMES)


def test_patterns_are_tried_before_they_are_used() -> None:
    """Also where the model has nothing that they could match."""
    config = {"quant_method": "fp8", "ignored_layers": [r"re:("]}
    found = choose_quantization({"quantization_config": config}, None)
    assert found is not None
    with pytest.raises(ModelError, match="ignored_layers has the pattern"):
        assign_methods(nn.Sequential(), found, DenseMethod())


@pytest.mark.parametrize("pattern", ["(", "(" * 5000 + ")" * 5000, "a{99999999999}"])
def test_what_is_no_pattern_is_said(pattern: str) -> None:
    with pytest.raises(
        ModelError, match=r"ignored_layers has the pattern .* which is not a regular expression"
    ):
        try_expressions(find_expressions({"ignored_layers": [f"re:{pattern}"]}), NAMES)


def test_stars_of_a_name_are_no_regular_expression() -> None:
    stars = {"quant_method": "fp8", "ignored_layers": ["*a" * 40]}
    found = choose_quantization({"quantization_config": stars}, None)
    assert found is not None
    assert found.scheme("a" * 200 + "b", "linear") is not None
