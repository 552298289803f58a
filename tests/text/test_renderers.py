"""Renderers of families whose checkpoints come without a template, against the families' own code
where that can be had, and against the parsers that read the same format."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.errors import InputError, ModelError
from penstock.text.parsing.deltas import collect
from penstock.text.parsing.formats import Tool
from penstock.text.parsing.parser import detect, make_output_parser
from penstock.text.renderers.base import Renderer
from penstock.text.renderers.deepseek import DeepSeekRenderer
from penstock.text.renderers.harmony import HarmonyRenderer
from penstock.text.renderers.mistral import MistralRenderer
from penstock.text.tekken import read_tekken, version_of
from penstock.text.tokenizer import Tokenizer, tokenizer_from_folder

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS},
    }
]
CALL_ID = "abcdefgh1"
CALL = {
    "id": CALL_ID,
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Weather in Zürich?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL_ID, "name": "weather", "content": "rain"},
]


@pytest.fixture(scope="module")
def tekken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real vocabulary, which mistral-common has, under the name that models give it."""
    data = Path(str(files("mistral_common").joinpath("data/tekken_240911.json")))
    folder = tmp_path_factory.mktemp("tekken")
    (folder / "tekken.json").symlink_to(data)
    return folder


@pytest.fixture(scope="module")
def tekken(tekken_folder: Path) -> Tokenizer:
    return tokenizer_from_folder(tekken_folder)


@pytest.fixture(scope="module")
def official(tekken_folder: Path) -> Any:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    return Tekkenizer.from_file(str(tekken_folder / "tekken.json"))


@pytest.mark.parametrize(
    "text",
    ["Hello, world!", "  two  spaces\n\n\tand more", "Zürich 北京 🙂", "x = {'a': 1.5}", "don't"],
)
def test_tekken_gives_the_tokens_of_mistrals_own_code(
    tekken: Tokenizer, official: Any, text: str
) -> None:
    ids = tekken.encode(text, add_special_tokens=False)
    assert ids == official.encode(text, bos=False, eos=False)
    assert tekken.decode(ids) == text
    assert tekken.end_ids == {official.eos_id}


TEKKEN_CONFIG = {"default_vocab_size": 2, "pattern": ".", "default_num_special_tokens": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read: JSONDecodeError"),
        ([], "cannot be read: TypeError"),
        ({"config": {}}, r"cannot be read: KeyError\('default_num_special_tokens'\)"),
        ({"config": {"default_num_special_tokens": 10**12}}, "must be from 0 to 65536, got 1000"),
        ({"config": TEKKEN_CONFIG}, r"is not a tokenizer \(KeyError\('vocab'\)\): give another"),
        ({"config": TEKKEN_CONFIG, "vocab": [{"token_bytes": 5}]}, "is not a tokenizer"),
    ],
)
def test_a_broken_tekken_file_is_named(content: Any, message: str, tmp_path: Path) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "tekken.json").write_text(text)
    with pytest.raises(ModelError, match=f"tekken.json .*{message}"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["alone", "tools"])
@pytest.mark.parametrize("version", [3, 7])
def test_mistral_prompts_equal_those_of_mistrals_own_code(
    tekken: Tokenizer, official: Any, version: int, tools: Any
) -> None:
    from mistral_common.protocol.instruct.normalize import get_normalizer
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.base import TokenizerVersion
    from mistral_common.tokens.tokenizers.instruct import InstructTokenizerV3, InstructTokenizerV7

    encoder: Any = (InstructTokenizerV3 if version == 3 else InstructTokenizerV7)(official)
    request = ChatCompletionRequest.from_openai(messages=CONVERSATION, tools=tools)
    normalizer: Any = get_normalizer(TokenizerVersion(f"v{version}"), None)
    instruct = normalizer.from_chat_completion_request(request)
    prompt = MistralRenderer(version).render(CONVERSATION, tools=tools)
    assert tekken.encode(prompt, False) == encoder.encode_instruct(instruct).tokens


def test_the_version_is_read_from_the_vocabulary(tekken_folder: Path) -> None:
    content = read_tekken(tekken_folder)
    assert content is not None
    assert version_of(content) == 3


RENDERERS: list[tuple[Renderer, str, str]] = [
    (MistralRenderer(3), "mistral", "</s>"),
    (MistralRenderer(7), "mistral", "</s>"),
    (MistralRenderer(11), "mistral", "</s>"),
    (MistralRenderer(13, has_thinking=True), "mistral", "</s>"),
    (DeepSeekRenderer(), "deepseek_v3", "<｜end▁of▁sentence｜>"),
    (HarmonyRenderer(), "openai", ""),
]
every_renderer = pytest.mark.parametrize(
    ("renderer", "parser", "end"), RENDERERS, ids=["v3", "v7", "v11", "v13", "deepseek", "harmony"]
)


@every_renderer
def test_a_family_reads_the_calls_that_it_writes(renderer: Renderer, parser: str, end: str) -> None:
    assert detect(renderer.source).tools == parser
    before = renderer.render(CONVERSATION[:4], tools=TOOLS)
    after = renderer.render(CONVERSATION[:5], tools=TOOLS, add_generation_prompt=False)
    assert after.startswith(before)
    written = after[len(before) :].removesuffix(end)
    reader = make_output_parser(
        None, parser, tools_offered=[Tool("weather", PARAMETERS, "Weather.")]
    )
    (call,) = collect([*reader.feed(written), *reader.finish()]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Zürich"})
    whole = renderer.render(CONVERSATION, tools=TOOLS)
    assert whole.startswith(after)
    assert "rain" in whole[len(after) :]


@every_renderer
def test_a_last_message_can_be_continued(renderer: Renderer, parser: str, end: str) -> None:
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = renderer.render(CONVERSATION[:3], **options)
    assert prompt.endswith("Hi!")
    assert renderer.render(CONVERSATION[:3], add_generation_prompt=False).startswith(prompt)
    with pytest.raises(InputError, match="cannot be combined"):
        renderer.render(CONVERSATION[:3], continue_final_message=True)


@every_renderer
def test_a_role_that_there_is_not_is_the_clients_error(
    renderer: Renderer, parser: str, end: str
) -> None:
    with pytest.raises(InputError, match="role must be one of"):
        renderer.render([{"role": "narrator", "content": "x"}])


def test_harmony_says_what_the_published_format_says() -> None:
    prompt = HarmonyRenderer().render(
        CONVERSATION[:2], tools=TOOLS, reasoning_effort="high", current_date="2025-06-28"
    )
    assert prompt == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: high\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every "
        "message.\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n// Weather.\ntype weather = (_: {\n// Where.\ncity: string,\n"
        'unit?: "c" | "f", // default: c\ndays?: number[],\n}) => any;\n\n'
        "} // namespace functions<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant"
    )


def test_harmony_shows_reasoning_of_the_present_turn_alone() -> None:
    def think(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "reasoning": f"Thought {message['content'] or 'of tools'}"}

    chat = [think(m) if m["role"] == "assistant" else m for m in CONVERSATION]
    prompt = HarmonyRenderer().render(chat, tools=TOOLS)
    assert "<|channel|>analysis<|message|>Thought of tools<|end|>" in prompt
    assert "Thought Hi!" not in prompt
    assert "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>rain" in prompt


def test_deepseek_thinks_if_it_is_asked_to() -> None:
    render = DeepSeekRenderer().render
    assert render(CONVERSATION[:2]).endswith("<｜User｜>Hello<｜Assistant｜></think>")
    assert render(CONVERSATION[:2], thinking=True).endswith("<｜Assistant｜><think>")
    assert render(CONVERSATION, tools=TOOLS).endswith("rain<｜tool▁output▁end｜>")
