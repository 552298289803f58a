"""Compiles a chat template with Jinja, in its immutable sandbox.

A template is code. The model's own runs in this process. A client's runs in a confined process with
limited time and memory (`text_pool.py`). Errors of a template concern the given conversation, so
they are the request's errors (`InputError`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.protocol.errors import InputError
from penstock.text.chat_history import PROBE_TOOLS, HistoryForm, find_form

if TYPE_CHECKING:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment


class CompiledTemplate:
    """One parsed template. Jinja is imported here, when the first conversation arrives."""

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
        except Exception as error:  # Python refuses the generated code: a break without a loop
            raise InputError(
                f"the chat template cannot be compiled: {str(error) or type(error).__name__}",
                "messages",
            ) from error
        self.takes_parts = _loops_over_content(tree)
        self._history_form: HistoryForm | None = None

    def history_form(self, special_tokens: Mapping[str, str]) -> HistoryForm:
        """How it takes calls of earlier turns. Determined when there are some."""
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
        except Exception as error:  # a template, which is foreign code, may raise anything
            raise InputError(
                f"the chat template refuses these messages: {str(error) or type(error).__name__}",
                "messages",
            ) from error


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template iterates over a content's parts, and so takes them unchanged."""
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
        """`{% generation %}` marks assistant text for training. Here it is plain text."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Refuses names with a meaning in Python."""

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
        """JSON as in training: Jinja's own filter would escape HTML characters."""
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
