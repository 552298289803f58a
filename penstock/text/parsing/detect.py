"""Detects the parsers that a chat template needs, if it is unambiguous."""

from __future__ import annotations

from typing import NamedTuple


class Detected(NamedTuple):
    """Parser names; None if the template does not tell."""

    reasoning: str | None
    tools: str | None


def detect(chat_template: str) -> Detected:
    """The parsers that `chat_template` needs, from markers that only one family writes."""
    tools = _tools(chat_template)
    return Detected(_reasoning(chat_template, tools), tools)


# The first entry whose texts are all in the template applies. Order matters: several families write
# <tool_call> and differ only inside it.
_TOOL_MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")),
    ("glm45", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>", "</tool_call>", "arguments")),
    ("llama3_json", ('{"name": function name, "parameters":',)),
    ("pythonic", ("[func_name1(params_name1=",)),
)


def _tools(template: str) -> str | None:
    for name, texts in _TOOL_MARKERS:
        if all(text in template for text in texts):
            return name
    return None


def _reasoning(template: str, tools: str | None) -> str | None:
    if tools == "openai":
        return "openai_gptoss"
    if "[THINK]" in template:
        return "mistral"
    if "Here is my thought process" in template:
        return "granite"
    if "<think>" not in template:
        return None
    if tools in ("glm45", "minimax_m2", "granite", "kimi_k2"):
        return tools
    if tools == "deepseek_v3" or "<｜Assistant｜>" in template:
        return "deepseek_v3" if "thinking" in template else "deepseek_r1"
    return "qwen3" if tools in ("hermes", "qwen3_coder") else None
