"""Patterns that come with a checkpoint cannot keep a load from ending."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from penstock.layers.quantized.checkpoints import choose_quantization
from penstock.layers.quantized.patterns import check_pattern
from penstock.protocol.errors import ModelError

CATASTROPHIC = [
    r"(a+)+$",
    r"(a|a)*$",
    r"(?:a|aa)+b",
    r"((ab?)*c)*d",
    r"(.*)*x",
    r"(?:.{1,9}){1,9}y",
    r".*.*.*.*.*.*.*.*z",
    r".*a.*a.*a.*a.*a.*a.*$",
    "a?" * 40 + "a" * 40,
    "(?:a|aa)" * 40 + "$",
    r"(?=(a+)+$)a",
    r"(?P<one>a)?(?(one)(b*)*|c)",
]
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
    with pytest.raises(ModelError, match=r"some field has the pattern .* may take too long"):
        check_pattern("some field", pattern)


@pytest.mark.parametrize("pattern", ORDINARY)
def test_ordinary_patterns_are_not(pattern: str) -> None:
    check_pattern("some field", pattern)


@pytest.mark.parametrize(
    "pattern", [r".*a.*a.*a.*ab", r"a*a*a*a*b", r"(?:a|aa)(?:a|aa)(?:a|aa).*a.*ab", ORDINARY[7]]
)
def test_the_worst_that_is_let_through_ends_soon(pattern: str) -> None:
    check_pattern("some field", pattern)
    started = time.process_time()
    assert not re.match(pattern, "a" * 100)
    assert time.process_time() - started < 5  # of which a slow machine needs one


GROUP = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("ignore", {"quant_method": "compressed-tensors", "ignore": ["re:(a+)+$"]}),
        (
            "targets",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {**GROUP, "targets": ["re:(a+)+$"]}},
            },
        ),
        ("dynamic", {"quant_method": "gptq", "bits": 4, "dynamic": {"-:(a+)+$": {}}}),
        ("modules_to_not_convert", {"quant_method": "awq", "modules_to_not_convert": ["re:(a+)+"]}),
        ("ignored_layers", {"quant_method": "fp8", "ignored_layers": ["re:(a+)+$"]}),
        (
            "exclude_modules",
            {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["re:(a+)+$"]},
        ),
    ],
)
def test_the_field_that_has_one_is_named(field: str, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"quantization_config's {field} has the pattern"):
        choose_quantization({"quantization_config": config}, None)


@pytest.mark.parametrize("pattern", ["(", "(" * 5000 + ")" * 5000, "a{99999999999}"])
def test_what_is_no_pattern_is_said(pattern: str) -> None:
    config = {"quant_method": "fp8", "ignored_layers": [f"re:{pattern}"]}
    with pytest.raises(ModelError, match="quantization_config cannot be read"):
        choose_quantization({"quantization_config": config}, None)


def test_stars_of_a_name_are_no_regular_expression() -> None:
    stars = {"quant_method": "fp8", "ignored_layers": ["*a" * 40]}
    found = choose_quantization({"quantization_config": stars}, None)
    assert found is not None
    assert found.scheme("a" * 200 + "b", "linear") is not None
