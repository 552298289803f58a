"""Conversations rendered to prompts through the model's chat template.

A template is code: it runs in Jinja's immutable sandbox and sees nothing but plain JSON values. The
model's own runs in this process; one that came with a request runs in a confined process, where its
time and memory are limited (`text_pool.py`). A template's errors are about the conversation it was
given, so they are the request's (`InputError`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.protocol.errors import ConfigError, InputError, ModelError
from penstock.text.chat_history import PROBE_TOOLS, HistoryForm, find_form, fit_reasoning
from penstock.text.messages import check_calls
from penstock.text.tokenizer import Tokenizer, read_json_if_there

if TYPE_CHECKING:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from penstock.loading.source import ModelSource

Message = Mapping[str, Any]

# Appended to the message to be continued: where it is found, the prompt ends. The space shows
# whether the template trims what it is given.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """Renders conversations. `templates` are by name; "tool_use" is taken where there are tools."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, _Compiled] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is no template at all."""
        return not self._templates

    @property
    def source(self) -> str:
        """The template, or the one for conversations with tools; empty if there is none."""
        return self._templates.get("tool_use") or self._templates.get("default", "")

    def render(
        self,
        messages: Sequence[Message],
        /,  # so that a template's argument may have any name
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt for `messages`, special tokens included: encode it without adding more.

        With `continue_final_message` the prompt ends where the last message does.
        """
        template = self._template(has_tools=tools is not None)
        chat = check_conversation(
            messages, add_generation_prompt, continue_final_message, template.takes_parts
        )
        for message in chat:
            if message["role"] == "assistant":
                fit_reasoning(message)
                if message.get("tool_calls"):
                    template.history_form(self._special_tokens).fit(message)
        last = _mark_end(chat[-1]) if continue_final_message else ""
        arguments = _plain({**self._special_tokens, **template_kwargs}, "template arguments")
        arguments |= {
            "messages": chat,
            "tools": _plain(tools, "tools"),
            "documents": _plain(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = template.render(arguments)
        return _cut_at_mark(text, last) if continue_final_message else text

    def _template(self, has_tools: bool) -> _Compiled:
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if not self._templates:
            raise InputError(
                "this model has no chat template: give one as chat_template (a Jinja file or the "
                "template itself), or send a prompt in place of messages",
                "messages",
            )
        if name not in self._templates:
            raise InputError(
                f"this model has chat templates named {', '.join(sorted(self._templates))} but no "
                "default: give one as chat_template (a Jinja file or the template itself)",
                "messages",
            )
        if name not in self._compiled:
            self._compiled[name] = _Compiled(self._templates[name])
        return self._compiled[name]


def load_chat_template(
    source: ModelSource, tokenizer: Tokenizer, chat_template: str | None = None
) -> ChatTemplate:
    """From `chat_template` (a file or the template itself), else from beside the tokenizer, else
    from the model. Without any, every conversation is refused with the remedy."""
    if chat_template is not None:
        return ChatTemplate(
            {"default": read_chat_template(chat_template)}, tokenizer.special_tokens
        )
    templates: dict[str, str] = {}
    if tokenizer.folder is not None:
        templates = templates_in_folder(tokenizer.folder)
    if not templates and source.gguf is not None:
        templates = templates_in_gguf(source.gguf.metadata)
    if not templates and source.kind == "folder":
        templates = templates_in_folder(source.path)
    return ChatTemplate(templates, tokenizer.special_tokens)


def read_chat_template(chat_template: str) -> str:
    """The template that a user gave: itself, or the path of its file. Refuses a broken one."""
    is_template = "{{" in chat_template or "{%" in chat_template
    if not is_template:
        try:
            chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"chat_template is neither a Jinja template nor a file that can be read: {error}"
            ) from error
    try:
        _Compiled(chat_template)
    except InputError as error:
        raise ConfigError(f"chat_template is broken: {error}") from error
    return chat_template


def templates_in_folder(folder: Path) -> dict[str, str]:
    """Files take precedence over tokenizer_config.json."""
    templates = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(path)
    if templates:
        return templates
    path = folder / "tokenizer_config.json"
    template = read_json_if_there(path).get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError) as error:
        raise ModelError(
            f"chat_template in {path} must be a string or a list of objects with name and template"
        ) from error


def templates_in_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if key == prefix:
            templates["default"] = str(value)
        elif key.startswith(prefix + ".") and isinstance(value, str):
            templates[key.removeprefix(prefix + ".")] = value
    return templates


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def check_conversation(
    messages: Sequence[Message],
    add_generation_prompt: bool,
    continue_final_message: bool,
    keep_parts: bool = False,
) -> list[dict[str, Any]]:
    """A plain copy of `messages`; InputError for what no renderer could make a prompt of."""
    if add_generation_prompt and continue_final_message:
        raise InputError(
            "continue_final_message and add_generation_prompt exclude each other: one goes on "
            "with the last message, the other begins a new one",
            "continue_final_message",
        )
    chat = check_messages(messages, keep_parts)
    check_calls(chat)
    return chat


def check_messages(messages: Sequence[Message], keep_parts: bool = False) -> list[dict[str, Any]]:
    """A plain copy of `messages`, or InputError for the first one that is wrong.

    Contents in parts become one string, unless `keep_parts`.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(
            f"messages must be a list of objects with role and content, got {messages!r:.100}",
            "messages",
        )
    if not messages:
        raise InputError("messages must hold at least one message, got none", "messages")
    return [_check_message(message, i, keep_parts) for i, message in enumerate(messages)]


def _check_message(message: Message, index: int, keep_parts: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be an object, got {message!r:.100}", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"{where}.role must be a non-empty string, got {role!r:.100}", where)
    checked: dict[str, Any] = _plain(message, where)
    content = checked.get("content")
    if isinstance(content, list):
        texts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        if not keep_parts:
            checked["content"] = "\n".join(texts)
    elif content is None:
        if not checked.get("tool_calls"):
            raise InputError(f"{where}.content is missing: it must be a string", where)
    elif not isinstance(content, str):
        raise InputError(f"{where}.content must be a string, got {content!r:.100}", where)
    return checked


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None:
        raise InputError(f"{where} must be an object with a type, got {part!r:.100}", where)
    if kind != "text":
        raise InputError(
            f"{where} is of type {kind!r:.100}, but this model takes text only: send parts of "
            "type 'text'",
            where,
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InputError(f"{where}.text must be a string, got {text!r:.100}", where)
    return text


def _plain(value: Any, where: str) -> Any:
    """A deep copy made of JSON's types only: other objects have methods a template might call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    for base in (str, int, float):  # subclasses, such as enums
        if isinstance(value, base):
            return base(value.value if hasattr(value, "value") else value)
    raise InputError(f"{where} must be plain JSON values, got a {type(value).__name__}", where)


def _mark_end(message: dict[str, Any]) -> str:
    """Mark the end of the message to be continued; returns the text it had."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return content
    if isinstance(content, list) and content:
        text = str(content[-1]["text"])
        content[-1]["text"] = text + _END_MARK
        return text
    raise InputError(
        "continue_final_message needs a last message with text to go on from",
        "continue_final_message",
    )


def _cut_at_mark(text: str, last: str) -> str:
    at = text.rfind(_END_MARK.strip())
    if at < 0 or last.strip() not in text:
        raise InputError(
            "continue_final_message does not work here: the chat template leaves out the end of "
            "the last message",
            "continue_final_message",
        )
    keeps_spaces = text.startswith(_END_MARK, at)
    return text[:at] if keeps_spaces else text[:at].rstrip()


class _Compiled:
    """One template, parsed. Jinja is imported here, when the first conversation arrives."""

    def __init__(self, source: str) -> None:
        import jinja2

        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"the chat template is broken at line {error.lineno}: {error.message}", "messages"
            ) from error
        except Exception as error:  # Python refuses what Jinja made of it: a break without a loop
            raise InputError(
                f"the chat template cannot be compiled: {str(error) or type(error).__name__}",
                "messages",
            ) from error
        self.takes_parts = _loops_over_content(tree)
        self._history_form: HistoryForm | None = None

    def history_form(self, special_tokens: Mapping[str, str]) -> HistoryForm:
        """How it takes the calls of earlier turns; found out the first time there are any."""
        if self._history_form is None:
            self._history_form = find_form(
                lambda messages: self.render(
                    {**special_tokens, "messages": messages, "tools": PROBE_TOOLS}
                )
            )
        return self._history_form

    def render(self, arguments: Mapping[str, Any]) -> str:
        try:
            return self._template.render(arguments)
        except Exception as error:  # whatever a template, which is foreign code, runs into
            raise InputError(
                f"the chat template refuses these messages: {str(error) or type(error).__name__}",
                "messages",
            ) from error


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template goes through a content's parts, so that it takes them as they are."""
    from jinja2 import nodes

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in names

    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _environment() -> ImmutableSandboxedEnvironment:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks what the assistant said, for training; here it is only text."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Refuses names that Python itself gives a meaning."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be an attribute's name
            jinja2.utils.Namespace.__init__(args[0])
            for name, value in dict(*args[1:], **kwargs).items():
                args[0][name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(
                    f"namespace attribute {name!r} is not allowed"
                )
            super().__setitem__(name, value)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As models were trained on: Jinja's own would escape HTML's characters."""
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = tojson
    environment.globals.pop("lipsum")
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": Namespace,
    }
    return environment
