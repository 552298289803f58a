"""What a confined process does with text: encode a piece of it, or render a template."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable

import msgspec
import tokenizers

from penstock.protocol.errors import InputError
from penstock.text.chat import ChatTemplate

ENTRY = "penstock.text.text_worker:make_worker"
ENCODE, RENDER = b"e", b"r"  # what a job begins with
ID_TYPE = "I"  # of token ids in an answer


class RenderReply(msgspec.Struct):
    """A prompt, or why there is none."""

    prompt: str = ""
    error: str | None = None
    field: str | None = None


def make_worker(setup: bytes) -> Callable[[bytes], bytes]:
    """`setup` is the tokenizer as JSON."""
    backend = tokenizers.Tokenizer.from_str(setup.decode())

    def work(job: bytes) -> bytes:
        body = job[1:].decode()
        if job[:1] == RENDER:
            return msgspec.json.encode(_render(body))
        encoding = backend.encode_batch_fast([body], add_special_tokens=False)[0]
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
