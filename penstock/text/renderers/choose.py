"""Decides which renderer a model needs."""

from __future__ import annotations

from penstock.loading.source import ModelSource
from penstock.protocol.errors import ConfigError
from penstock.text.renderers.base import Renderer
from penstock.text.renderers.deepseek import DeepSeekRenderer
from penstock.text.renderers.generic_tools import GenericToolRenderer, shows_tools
from penstock.text.renderers.harmony import HarmonyRenderer
from penstock.text.renderers.mistral import MistralRenderer
from penstock.text.tekken import read_tekken, special_tokens_of, version_of
from penstock.text.templates import load_chat_template
from penstock.text.tokenizer import Tokenizer


def choose_renderer(
    name: str,
    source: ModelSource,
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    tool_parser: str | None = None,
    takes_parts: bool | None = None,
) -> Renderer:
    """The renderer called `name`.

    With "auto", gpt-oss has its own, other models use their template, and models without one use
    their family's renderer. If a template does not show tools, they are added, unless the
    operator's `tool_parser` cannot read calls in the added format. `takes_parts` is for templates.
    """
    if chat_template is not None and name not in ("auto", "template"):
        raise ConfigError(f"chat_template and chat_renderer={name} cannot be combined: drop one")
    kind = str(source.config.get("model_type", ""))
    if name == "harmony" or (name == "auto" and chat_template is None and kind == "gpt_oss"):
        return HarmonyRenderer()
    if name == "deepseek":
        return DeepSeekRenderer()
    if name == "mistral":
        return _mistral(tokenizer)
    template = load_chat_template(source, tokenizer, chat_template)
    template.takes_parts = takes_parts
    if name == "auto" and not template.is_empty and not shows_tools(template):
        generic = GenericToolRenderer(template)
        return generic if tool_parser in (None, generic.parser) else template
    if name == "template" or not template.is_empty:
        return template
    if tokenizer.folder is not None and read_tekken(tokenizer.folder) is not None:
        return _mistral(tokenizer)
    return DeepSeekRenderer() if kind.startswith("deepseek") else template


def _mistral(tokenizer: Tokenizer) -> MistralRenderer:
    content = None if tokenizer.folder is None else read_tekken(tokenizer.folder)
    if content is None:
        raise ConfigError(
            "chat_renderer=mistral needs a model with tekken.json; use its chat template instead"
        )
    return MistralRenderer(version_of(content), "[THINK]" in special_tokens_of(content))
