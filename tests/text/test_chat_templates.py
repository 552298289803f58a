"""Chat templates render as `transformers` does, and refuse what they should."""

from __future__ import annotations

import copy
import json
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizers import byte_level_backend

from penstock.protocol.errors import ConfigError, InputError, ModelError
from penstock.text.renderers.template import ChatTemplate
from penstock.text.templates import load_chat_template, templates_in_folder, templates_in_gguf
from penstock.text.tokenizer import Tokenizer

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Today Date: ' + date_string | default('26 Jul 2024') + '\n\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token}}{% endgeneration %}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, seen=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{%- continue %}{%- endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

PARTS = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}
{{ message.content }}{% else %}
{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}
;{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen": QWEN, "parts": PARTS}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

USER = {"role": "user", "content": "Hi <b>&\u00e9</b> 😀  "}
REPLY = {"role": "assistant", "content": "Hello there. "}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "a < b & 'é'", "parameters": {"z": 1, "a": [None]}},
}
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": "é<"}}}],
}
SYSTEM = {"role": "system", "content": "  Rules  "}

CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    *((name, [USER], {}) for name in TEMPLATES),
    *((name, [USER, REPLY, USER], {"add_generation_prompt": False}) for name in TEMPLATES),
    *(
        (name, [USER, REPLY], {"add_generation_prompt": False, "continue_final_message": True})
        for name in TEMPLATES
    ),
    ("llama3", [SYSTEM, USER, CALLS, USER], {"tools": [TOOL]}),
    ("llama3", [SYSTEM, USER], {"date_string": "1 Jan 2000"}),
    ("qwen", [SYSTEM, USER], {"tools": [TOOL]}),
    ("qwen", [USER], {"enable_thinking": False}),
    (
        "qwen",
        [{"role": "skip", "content": "x"}, USER],
        {"documents": [{"title": "t", "text": "x"}]},
    ),
    ("parts", [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}], {}),
    (
        "parts",
        [{"role": "user", "content": [{"type": "text", "text": "a "}] * 2}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **SPECIAL)


@pytest.mark.parametrize(("name", "messages", "options"), CASES)
def test_prompts_equal_those_of_transformers(
    theirs: Any, name: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    options = {"add_generation_prompt": True, **options}
    before = copy.deepcopy(messages)
    rendered = ChatTemplate({"default": TEMPLATES[name]}, SPECIAL).render(messages, **options)
    assert messages == before
    expected = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, **options
    )
    assert rendered == expected


def template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, SPECIAL)


def test_continuing_the_last_message_excludes_beginning_another() -> None:
    with pytest.raises(InputError, match="cannot be combined"):
        template(CHATML).render([USER], add_generation_prompt=True, continue_final_message=True)


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(InputError, match="leaves out"):
        template("{{ messages[0].content }}").render(
            [USER, REPLY], add_generation_prompt=False, continue_final_message=True
        )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "list"),
        ({"role": "user", "content": "Hi"}, "list"),
        (None, "list"),
        ([], "at least one"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\].role"),
        ([{"role": "", "content": "x"}], "role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": None}], "content"),
        ([{"role": "user", "content": 7}], "content must be a string, got 7"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "not supported"),
        ([{"role": "user", "content": "x", "extra": object()}], "plain JSON"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        template(CHATML).render(messages)
    assert error.value.field is not None


def test_parts_are_joined_where_the_template_wants_a_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rendered = template("{{ messages[0].content | upper }}").render(
        [{"role": "user", "content": parts}]
    )
    assert rendered == "ONE\nTWO"


def test_parts_reach_a_template_that_loops_over_them_through_a_variable() -> None:
    text = "{% set c = messages[0]['content'] %}{% for p in c %}<{{ p.text }}>{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template(text).render([{"role": "user", "content": parts}]) == "<one><two>"


@pytest.mark.parametrize(
    "text",
    [
        CHATML,  # which stumbles over a content that is null
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",  # writes it out
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}"
        "{% endfor %}{% endfor %}",
        # Wants objects, and does not show what they hold.
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.arguments.items() | length }}{% endfor %}{% endfor %}",
    ],
)
def test_a_call_without_content_is_no_text_to_a_template_that_wants_one(text: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "7"},
    ]
    prompt = ChatTemplate({"default": text}, {}).render(messages)
    assert "None" not in prompt
    assert "7" in prompt


def test_a_role_may_be_an_enum_of_strings() -> None:
    class Role(str, Enum):
        USER = "user"

    text = "{{ messages[0].role }}"
    assert template(text).render([{"role": Role.USER, "content": "x"}]) == "user"


def test_an_error_raised_by_the_template_is_the_requests() -> None:
    with pytest.raises(InputError, match="must alternate"):
        template(MISTRAL).render([REPLY, USER])


@pytest.mark.parametrize("text", ["{{ messages[0].content + 1 }}", "{{ nothing.x }}", "{{ 1/0 }}"])
def test_whatever_goes_wrong_in_a_template_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError, match="refuses these messages"):
        template(text).render([USER])


def test_a_template_with_broken_syntax_names_the_line() -> None:
    with pytest.raises(InputError, match="line 2"):
        template("\n{% for %}").render([USER])


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(__class__='x') }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 'x' %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('%s' | attr('__class__')).x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ lipsum() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_templates_cannot_leave_the_sandbox(text: str) -> None:
    with pytest.raises(InputError):
        template(text).render([USER])


def test_the_date_is_at_hand() -> None:
    assert template("{{ strftime_now('%Y') }}").render([USER]).isdigit()


def test_a_model_without_a_template_says_how_to_give_one() -> None:
    with pytest.raises(InputError, match="chat_template"):
        ChatTemplate({}).render([USER])


def test_named_templates_without_a_default_are_named() -> None:
    with pytest.raises(InputError, match="rag"):
        ChatTemplate({"rag": "x"}).render([USER])


def test_tools_choose_the_template_for_tools() -> None:
    named = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert named.render([USER]) == "plain"
    assert named.render([USER], tools=[TOOL]) == "tools"


# Where templates come from -------------------------------------------------------------------


def source(path: Path, metadata: dict[str, Any] | None = None) -> Any:
    gguf = None if metadata is None else SimpleNamespace(metadata=metadata)
    return SimpleNamespace(path=path, kind="folder" if gguf is None else "gguf", gguf=gguf)


def test_a_folder_has_its_template_in_the_configuration_or_in_files(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert templates_in_folder(tmp_path) == {}
    config.write_text(json.dumps({"chat_template": "one"}))
    assert templates_in_folder(tmp_path) == {"default": "one"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert templates_in_folder(tmp_path) == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("more")
    assert templates_in_folder(tmp_path) == {"default": "file", "rag": "more"}


def test_a_malformed_list_of_templates_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [1]}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        templates_in_folder(tmp_path)


def test_a_gguf_file_has_its_templates_in_the_metadata() -> None:
    metadata = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["tool_use"],
    }
    assert templates_in_gguf(metadata) == {"default": "a", "tool_use": "b"}


def test_the_tokenizers_folder_goes_before_the_model_and_an_override_before_both(
    tmp_path: Path,
) -> None:
    model = source(tmp_path, {"tokenizer.chat_template": "from the model"})
    backend = byte_level_backend()
    assert load_chat_template(model, Tokenizer(backend)).render([USER]) == "from the model"
    (tmp_path / "chat_template.jinja").write_text("from the tokenizer")
    beside = Tokenizer(backend, SPECIAL, folder=tmp_path)
    assert load_chat_template(model, beside).render([USER]) == "from the tokenizer"
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }} mine")
    assert load_chat_template(model, beside, str(file)).render([USER]) == "<s> mine"
    assert load_chat_template(model, beside, "{{ bos_token }}!").render([USER]) == "<s>!"


@pytest.mark.parametrize("override", ["nowhere.jinja", "{% for %}"])
def test_an_override_that_cannot_work_is_refused_at_the_start(
    tmp_path: Path, override: str
) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        load_chat_template(source(tmp_path), Tokenizer(byte_level_backend()), override)


def test_jinja_is_imported_only_when_a_conversation_arrives() -> None:
    import subprocess

    code = (
        "import sys, penstock.text.renderers.template as c; c.ChatTemplate({'default': 'x'}); "
        "sys.exit(any(m in sys.modules for m in ('jinja2', 'torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("takes_parts", "shown"),
    [(None, "hi"), (False, "hi"), (True, "[{'type': 'text', 'text': 'hi'}]")],
)
def test_the_form_of_contents_can_be_given(takes_parts: bool | None, shown: str) -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"})
    template.takes_parts = takes_parts
    assert template.render([{"role": "user", "content": "hi"}]) == shown


def test_parts_are_joined_for_a_template_that_is_said_to_take_texts() -> None:
    loops = "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate({"default": loops + "{{ messages[0].content }}"})
    template.takes_parts = False
    assert template.render([{"role": "user", "content": parts}]).endswith("a\nb")
