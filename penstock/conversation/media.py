"""Takes images out of conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.protocol.errors import InputError
from penstock.text.frontend import Frontend

if TYPE_CHECKING:
    from penstock.media.content import MediaContent

Messages = Sequence[Mapping[str, Any]]
IMAGE_TYPES = ("image_url", "input_image", "image_pil", "image")


def take_media(frontend: Frontend, messages: Messages) -> tuple[Messages, list[MediaContent]]:
    """The conversation with a part of type image in the place of each image, and the images.

    Such a part has `text`, too: what a template gets that takes no parts.
    """
    found: list[MediaContent] = []
    if not any(_has_image(message) for message in _listed(messages)):
        return messages, found
    if frontend.media is None:
        where = next(
            f"messages[{index}].content[{at}]"
            for index, message in enumerate(messages)
            for at, part in enumerate(message["content"] if _has_image(message) else ())
            if _is_image(part)
        )
        raise InputError(
            f"{where} is an image, but this model takes text only: send parts of type 'text'", where
        )
    placeholder = {"type": "image", "text": frontend.media.info().image_token}
    taken: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        if not _has_image(message):
            taken.append(message)
            continue
        parts: list[Any] = []
        for at, part in enumerate(message["content"]):
            if _is_image(part):
                found.append(_read(part, f"messages[{index}].content[{at}]"))
                parts.append(placeholder)
            else:
                parts.append(part)
        taken.append({**message, "content": parts})
    return taken, found


def _listed(messages: Messages) -> Messages:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    return messages if is_list else ()  # `check_messages` refuses the others


def _has_image(message: Mapping[str, Any]) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, (list, tuple)) and any(map(_is_image, content))


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def _read(part: Mapping[str, Any], where: str) -> MediaContent:
    from penstock.media.content import MediaContent, read_data_url, read_image

    given = part.get("image_url", part.get("image_pil", part.get("image")))
    if isinstance(given, Mapping):
        where, given = f"{where}.image_url.url", given.get("url")
    if given is None:
        raise InputError(f'{where} must have image_url: {{"url": ...}}', where)
    if not isinstance(given, str):
        return read_image(given, where)
    return MediaContent("image", read_data_url(given, where), where)
