"""The work of a confined process: encode a piece of text, or render a template."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable

import msgspec
import tokenizers

from penstock.protocol.errors import InputError
from penstock.text.renderers.template import ChatTemplate

ENTRY = "penstock.text.text_worker:make_worker"
# The first byte of a job: encode a text without or with special tokens, or render a template.
ENCODE, ENCODE_WHOLE, RENDER = b"e", b"w", b"r"
ID_TYPE = "I"  # of token ids in a reply


class RenderReply(msgspec.Struct):
    """A prompt, or why there is none."""

    prompt: str = ""
    error: str | None = None
    field: str | None = None


def make_worker(setup: bytes) -> Callable[[bytes], bytes]:
    """`setup` is the tokenizer as JSON."""
    backend = tokenizers.Tokenizer.from_str(setup.decode())

    def work(job: bytes) -> bytes:
        kind, body = job[:1], job[1:].decode()
        if kind == RENDER:
            return msgspec.json.encode(_render(body))
        (encoding,) = backend.encode_batch_fast([body], add_special_tokens=kind == ENCODE_WHOLE)
        return array(ID_TYPE, encoding.ids).tobytes()

    return work


def _render(body: str) -> RenderReply:
    template, special_tokens, messages, options = json.loads(body)
    try:
        prompt = ChatTemplate({"default": template}, special_tokens).render(messages, **options)
        prompt.encode()
    except InputError as error:
        return RenderReply(error=str(error), field=error.field)
    except RecursionError:
        return RenderReply(error="messages must be nested less deeply", field="messages")
    except UnicodeEncodeError:
        return RenderReply(error="the prompt has a lone surrogate", field="messages")
    return RenderReply(prompt=prompt)
