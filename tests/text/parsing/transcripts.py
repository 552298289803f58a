"""Outputs in each family's own format, as its template or its documentation shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from replay import call


@dataclass(frozen=True)
class Transcript:
    name: str
    model: str  # a key of real_tokenizers.TOKENIZERS
    text: str
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    prompt: str = ""

    @property
    def options(self) -> dict[str, Any]:
        return {
            "reasoning": self.reasoning_parser,
            "tools": self.tool_parser,
            "prompt": self.prompt,
        }


PARIS = call("get_weather", city="Paris", days=3)
TRICKY = 'quo"te, {brace}, back\\slash, 数據 🌧️,\n</tool_call> [TOOL_CALLS] <|call|> </think>'
TRICKY_JSON = (
    '"quo\\"te, {brace}, back\\\\slash, 数據 🌧️,\\n</tool_call> [TOOL_CALLS] <|call|> </think>"'
)

TRANSCRIPTS = [
    Transcript(
        "hermes with text before and two calls",
        "qwen2_5",
        "I'll look it up.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        tool_parser="hermes",
        content="I'll look it up.",
        calls=[PARIS, call("now")],
    ),
    Transcript(
        "hermes with markers within a string",
        "qwen3",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": {TRICKY_JSON}}}}}\n'
        "</tool_call>",
        tool_parser="hermes",
        calls=[call("get_weather", city=TRICKY)],
    ),
    Transcript(
        "qwen3 thinks and calls",
        "qwen3",
        "<think>\nThe user wants </think the weather.\n\nI call it.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": null}}\n'
        "</tool_call>",
        "qwen3",
        "hermes",
        reasoning="The user wants </think the weather.\n\nI call it.",
        calls=[call("get_weather", city="Paris", unit=None)],
    ),
    Transcript(
        "qwen3 after a prompt that thinks already",
        "qwen3",
        "Easy: 4.\n</think>\n\nIt is **4**.\n",
        "qwen3",
        "hermes",
        content="It is **4**.\n",
        reasoning="Easy: 4.",
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    Transcript(
        "qwen3 with thinking off",
        "qwen3",
        "It is 4.",
        "qwen3",
        "hermes",
        content="It is 4.",
        prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    Transcript(
        "llama3_json",
        "llama3_2",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        tool_parser="llama3_json",
        calls=[PARIS],
    ),
    Transcript(
        "llama3_json with the tag and two calls",
        "llama3_2",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"name": "now", "parameters": {}}',
        tool_parser="llama3_json",
        calls=[PARIS, call("now")],
    ),
    Transcript(
        "llama3_json that answers in JSON",
        "llama3_2",
        '{"name": "Paris", "population": 2100000, "parameters": {}}',
        tool_parser="llama3_json",
        content='{"name": "Paris", "population": 2100000, "parameters": {}}',
    ),
    Transcript(
        "pythonic",
        "llama3_2",
        "[get_weather(city='Paris', days=3), get_weather(city=\"Saint-Jean d'Angély\", "
        "metric=True, unit=None, hours=[1, -2], place={'lat': 4.5}), now()]",
        tool_parser="pythonic",
        calls=[
            PARIS,
            call(
                "get_weather",
                city="Saint-Jean d'Angély",
                metric=True,
                unit=None,
                hours=[1, -2],
                place={"lat": 4.5},
            ),
            call("now"),
        ],
    ),
    Transcript(
        "pythonic that answers with a list",
        "llama3_2",
        "[1](https://example.org) is a link, [now] is not a call.",
        tool_parser="pythonic",
        content="[1](https://example.org) is a link, [now] is not a call.",
    ),
    Transcript(
        "mistral's array",
        "mistral_nemo",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, '
        '"id": "VvvODy9mT"}, {"name": "now", "arguments": {}}]',
        tool_parser="mistral",
        calls=[PARIS, call("now")],
    ),
    Transcript(
        "mistral's names and arguments, after thinking",
        "magistral",
        "[THINK]Two calls.[/THINK]Wait.[TOOL_CALLS]get_weather[ARGS]"
        '{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]Xo1aB2c3D[ARGS]{}',
        "mistral",
        "mistral",
        content="Wait.",
        reasoning="Two calls.",
        calls=[PARIS, call("now")],
    ),
    Transcript(
        "deepseek_v3",
        "deepseek_v3",
        "Moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        tool_parser="deepseek_v3",
        content="Moment.",
        calls=[PARIS, call("now")],
    ),
    Transcript(
        "deepseek_v3 as V3.1 writes it, after thinking",
        "deepseek_v3_1",
        "Need the weather.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
        '<｜tool▁sep｜>{"city": "```"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v3",
        "deepseek_v3",
        reasoning="Need the weather.",
        calls=[call("get_weather", city="```"), call("now")],
        prompt="<｜User｜>Hi<｜Assistant｜><think>",
    ),
    Transcript(
        "deepseek_v3 with thinking off",
        "deepseek_v3_1",
        "Hello!",
        "deepseek_v3",
        "deepseek_v3",
        content="Hello!",
        prompt="<｜User｜>Hi<｜Assistant｜></think>",
    ),
    Transcript(
        "deepseek_r1 writes the marker itself",
        "deepseek_v3_1",
        "<think>\nHm. <think> again?\n</think>\n\nThe answer is 4.",
        "deepseek_r1",
        content="The answer is 4.",
        reasoning="Hm. <think> again?",
        prompt="<｜User｜>2+2?<｜Assistant｜>",
    ),
    Transcript(
        "deepseek_r1 is cut off while it thinks",
        "deepseek_v3_1",
        "Let me see. It could be",
        "deepseek_r1",
        reasoning="Let me see. It could be",
        prompt="<｜User｜>2+2?<｜Assistant｜><think>\n",
    ),
    Transcript(
        "qwen3_coder",
        "qwen3",
        "I write it.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        '<a>\n</parameter>\n & "b"\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        "<parameter=metric>\nTrue\n</parameter>\n<parameter=unit>\nNone\n</parameter>\n"
        '<parameter=place>\n{"lat": 4.5}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        tool_parser="qwen3_coder",
        content="I write it.",
        calls=[
            call(
                "get_weather",
                city='<a>\n</parameter>\n & "b"\n',
                days=3,
                metric=True,
                unit=None,
                place={"lat": 4.5},
            ),
            call("now"),
        ],
    ),
    Transcript(
        "glm45",
        "glm4_5",
        "\n<think>Two calls, then.</think>\nSure.\n<tool_call>get_weather\n"
        "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "glm45",
        "glm45",
        content="Sure.",
        reasoning="Two calls, then.",
        calls=[PARIS, call("now")],
    ),
    Transcript(
        "glm45 on one line",
        "glm4_5",
        "<think></think><tool_call>get_weather<arg_key>city</arg_key><arg_value>3</arg_value>"
        "<arg_key>hours</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
        "glm45",
        "glm45",
        calls=[call("get_weather", city="3", hours=[1, 2])],
    ),
    Transcript(
        "minimax_m2",
        "gpt_oss",
        "The weather.\n</think>\n\nOne moment.\n<minimax:tool_call>\n"
        '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "minimax_m2",
        "minimax_m2",
        content="One moment.",
        reasoning="The weather.",
        calls=[PARIS, call("now")],
        prompt="]~b]ai\n<think>\n",
    ),
    Transcript(
        "kimi_k2",
        "deepseek_v3_1",
        "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 3}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        tool_parser="kimi_k2",
        content="Let me see.",
        calls=[PARIS, call("now")],
    ),
    Transcript(
        "kimi_k2 calls while it thinks",
        "deepseek_v3_1",
        "<think>I need the time.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "kimi_k2",
        "kimi_k2",
        reasoning="I need the time.",
        calls=[call("now")],
    ),
    Transcript(
        "granite",
        "glm4_5",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "now", "arguments": {}}]',
        tool_parser="granite",
        calls=[PARIS, call("now")],
    ),
    Transcript(
        "granite thinks in words",
        "glm4_5",
        "Here is my thought process:\nIt is Here is my r\n\nHere is my response:\nFour.",
        "granite",
        "granite",
        content="Four.",
        reasoning="It is Here is my r",
    ),
    Transcript(
        "granite thinks in tags",
        "glm4_5",
        "<think>It is four.</think><response>Four.</response>",
        "granite",
        "granite",
        content="Four.",
        reasoning="It is four.",
    ),
    Transcript(
        "harmony with a call",
        "gpt_oss",
        "<|channel|>analysis<|message|>Need to use get_weather.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city":"Paris","days":3}<|call|>',
        "openai_gptoss",
        "openai",
        content="I look it up.",
        reasoning="Need to use get_weather.",
        calls=[PARIS],
    ),
    Transcript(
        "harmony with the recipient in the role",
        "gpt_oss",
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}",
        "openai_gptoss",
        "openai",
        calls=[call("now")],
    ),
    Transcript(
        "harmony with an answer",
        "gpt_oss",
        "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant"
        "<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        "openai_gptoss",
        "openai",
        content="2 + 2 = 4.",
        reasoning="Simple.",
    ),
]
BY_NAME = {transcript.name: transcript for transcript in TRANSCRIPTS}
