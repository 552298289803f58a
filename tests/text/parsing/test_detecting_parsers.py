"""Parsers chosen by the chat template (real templates: test_real_chat_templates)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.text.parsing.parser import REASONING_PARSERS, TOOL_PARSERS, detect

# What is telling in templates that no package carries.
TELLING = {
    "GLM-4.5": (
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n"
        "<arg_value>{arg-value-1}</arg_value>\n</tool_call>{{ '\\n<think></think>' }}",
        ("glm45", "glm45"),
    ),
    "MiniMax-M2": (
        "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=\"tool-name-1\">"
        '<parameter name="param-key-1">{{ "<think>" ~ "\\n" }}',
        ("minimax_m2", "minimax_m2"),
    ),
    "Kimi-K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ tool_call['id'] }}"
        "<|tool_call_argument_begin|>",
        (None, "kimi_k2"),
    ),
    "Kimi-K2-Thinking": (
        "<think>{{ rc }}</think><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
        ("kimi_k2", "kimi_k2"),
    ),
    "DeepSeek-V3.1": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        "<｜Assistant｜>{{ '<think>' }}</think><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>",
        ("deepseek_v3", "deepseek_v3"),
    ),
    "DeepSeek-R1": (
        "<｜tool▁call▁begin｜>{{ type }}<｜tool▁sep｜>{{ name }}\n```json\n"
        "{{ '<｜Assistant｜><think>\\n' }}",
        ("deepseek_r1", "deepseek_v3"),
    ),
    "DeepSeek-R1-Distill-Qwen": ("{{ '<｜Assistant｜><think>\\n' }}", ("deepseek_r1", None)),
    "Qwen3-Coder": (
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n"
        "</parameter>\n</function>\n</tool_call>",
        (None, "qwen3_coder"),
    ),
    "Granite-3.3": (
        "write <|tool_call|> followed by a JSON list ... <think></think> <response></response>",
        ("granite", "granite"),
    ),
    "Granite-3.2": (
        "<|tool_call|> ... Write 'Here is my thought process:' ... 'Here is my response:'",
        ("granite", "granite"),
    ),
    "Magistral": ("[THINK]{{ t }}[/THINK][TOOL_CALLS]{{ name }}[ARGS]", ("mistral", "mistral")),
    "gpt-oss": (
        "<|start|>assistant<|channel|>analysis<|message|>{{ thinking }}<|end|>",
        ("openai_gptoss", "openai"),
    ),
    "Llama-4": (
        "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2()]",
        (None, "pythonic"),
    ),
    "one without tools": ("{{ message.content }}<|im_end|>", (None, None)),
    "one that thinks in an unknown way": ("<think>{{ message.content }}", (None, None)),
}


@pytest.mark.parametrize("model", TELLING)
def test_a_telling_template_names_its_parsers(model: str) -> None:
    template, names = TELLING[model]
    assert detect(template) == names


def test_the_docs_name_every_parser() -> None:
    text = (Path(__file__).parents[3] / "docs" / "parsers.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert named == {*TOOL_PARSERS, *REASONING_PARSERS}
