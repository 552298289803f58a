"""Makes prompts of pooling models from conversations."""

from __future__ import annotations

from penstock.conversation.media import take_media
from penstock.conversation.prepare import render_turn
from penstock.conversation.request import TurnRequest
from penstock.protocol.errors import InputError
from penstock.text.frontend import Frontend
from penstock.text.messages import check_messages
from penstock.text.pooling import MediaPrompt, PoolingPrompt, pooling_info


def pooling_prompt(frontend: Frontend, turn: TurnRequest) -> PoolingPrompt:
    """The prompt of a conversation, with its media. Slow: call it in a thread."""
    if pooling_info(frontend).dual is not None:
        return _only_message(frontend, turn)
    prompt, media = render_turn(frontend, turn)
    return MediaPrompt(prompt, media) if media else prompt


def _only_message(frontend: Frontend, turn: TurnRequest) -> PoolingPrompt:
    """The text or the image of a message, for a model that has no conversations."""
    taken, media = take_media(frontend, turn.messages, turn.media)
    messages = check_messages(taken, keep_parts=True)
    if len(messages) > 1:
        raise InputError(
            f"messages must be one message for this model, got {len(messages)}", "messages"
        )
    content = messages[0].get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    if not content and not media:
        raise InputError("messages must contain a text or an image, got neither", "messages")
    return MediaPrompt(content, media) if media else content
