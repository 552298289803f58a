"""Finds a model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.protocol.errors import ConfigError, InputError, ModelError
from penstock.text.jinja import CompiledTemplate
from penstock.text.renderers.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer, read_json_if_there

if TYPE_CHECKING:
    from penstock.loading.source import ModelSource


def load_chat_template(
    source: ModelSource, tokenizer: Tokenizer, chat_template: str | None = None
) -> ChatTemplate:
    """The template of `chat_template` (a file or the text), the tokenizer's folder, or the model.

    Without any, every conversation is refused with the remedy.
    """
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
    """A user's template: the text itself, or the path of its file. Refuses a broken one."""
    is_template = "{{" in chat_template or "{%" in chat_template
    if not is_template:
        try:
            chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"chat_template is neither a Jinja template nor a file that can be read: {error}"
            ) from error
    try:
        CompiledTemplate(chat_template)
    except InputError as error:
        raise ConfigError(f"chat_template is broken: {error}") from error
    return chat_template


def templates_in_folder(folder: Path) -> dict[str, str]:
    """The templates in a folder. Files take precedence over tokenizer_config.json."""
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
