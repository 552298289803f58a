"""Takes images and videos out of conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.conversation.request import MediaOptions
from penstock.protocol.errors import InputError
from penstock.protocol.media import Modality
from penstock.text.frontend import Frontend

if TYPE_CHECKING:
    from penstock.media.content import MediaContent

Messages = Sequence[Mapping[str, Any]]
TYPES: dict[str, Modality] = {
    "image_url": "image", "input_image": "image", "image_pil": "image", "image": "image",
    "image_embeds": "image", "video_url": "video", "video": "video", "video_embeds": "video",
}  # fmt: skip
NOUNS = {"image": "an image", "video": "a video"}
KEYS = ("url", "pil", "embeds")  # of a part, after its modality


@dataclass(frozen=True)
class MediaReference:
    """The URL of a part that came in another API's form, and the field that it came from."""

    url: str
    where: str


def take_media(
    frontend: Frontend, messages: Messages, options: MediaOptions | None = None
) -> tuple[Messages, list[MediaContent]]:
    """The conversation with a part of type image or video in the place of each, and the media.

    Such a part has `text`, too: what a template gets that takes no parts.
    """
    found: list[MediaContent] = []
    if not any(_has_media(message) for message in _listed(messages)):
        return messages, found
    taken: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        if not _has_media(message):
            taken.append(message)
            continue
        parts: list[Any] = []
        for at, part in enumerate(message["content"]):
            modality = _modality(part)
            if modality is None:
                parts.append(part)
                continue
            where = f"messages[{index}].content[{at}]"
            content = _read(part, modality, where)
            if frontend.media is None:
                if not content.where.startswith(where):  # it came in another API's form
                    where = content.where
                raise InputError(
                    f"{where} is {NOUNS[modality]}, but this model takes text only, or its "
                    "vision tower is not loaded (limit_mm_per_prompt, language_model_only): send "
                    "parts of type 'text'",
                    where,
                )
            token = frontend.media.token_of(modality, content.where)
            found.append(_with_options(content, options))
            parts.append({"type": modality, "text": token})
        taken.append({**message, "content": parts})
    return taken, found


def _listed(messages: Messages) -> Messages:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    return messages if is_list else ()  # `check_messages` refuses the others


def _has_media(message: Mapping[str, Any]) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, (list, tuple)) and any(map(_modality, content))


def _modality(part: object) -> Modality | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return TYPES.get(kind) if isinstance(kind, str) else None


def _with_options(content: MediaContent, options: MediaOptions | None) -> MediaContent:
    if options is None:
        return content
    return replace(
        content,
        kwargs=options.processor_kwargs or {},
        io_kwargs=(options.io_kwargs or {}).get(content.modality, {}),
    )


def _read(part: Mapping[str, Any], modality: Modality, where: str) -> MediaContent:
    from penstock.media.content import MediaContent, check_uuid, read_embeds, read_item

    uuid = check_uuid(part.get("uuid"), where)
    if (kind := part["type"]).endswith("_embeds"):
        if part.get(kind) is None and uuid is not None:
            return MediaContent(modality=modality, where=where, uuid=uuid)
        return read_embeds(part.get(kind), modality, f"{where}.{kind}", part)
    names = [modality, *(f"{modality}_{key}" for key in KEYS)]
    name = next((name for name in names if part.get(name) is not None), f"{modality}_url")
    given = part.get(name)
    if isinstance(given, MediaReference):
        return MediaContent(modality=modality, where=given.where, url=given.url, uuid=uuid)
    if isinstance(given, Mapping):
        uuid = uuid or check_uuid(given.get("uuid"), where)
        where, given = f"{where}.{name}.url", given.get("url")
    if given is None and uuid is None:
        raise InputError(f'{where} must have {modality}_url: {{"url": ...}}', where)
    if isinstance(given, str):
        return MediaContent(modality=modality, where=where, url=given, uuid=uuid)
    return read_item(given, modality, where, uuid)
