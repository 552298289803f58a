"""`TextPool` tokenizes long texts and renders clients' templates in confined processes."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.confined.errors import TooMuchMemory, TooMuchTime
from penstock.confined.pool import ConfinedPool, Limits
from penstock.confined.scope import need_turn, run_confined
from penstock.protocol.errors import InputError
from penstock.text.pieces import MAX_PIECE_LENGTH
from penstock.text.text_worker import ENCODE, ENCODE_WHOLE, ENTRY, ID_TYPE, RENDER, RenderReply
from penstock.text.tokenizer import Tokenizer

# Limits of one piece of text or one template. A large vocabulary takes some hundred MB per process,
# so there are few.
LIMITS = Limits(cpu_s=10.0, memory_bytes=192 * 2**20, num_workers=2)

_read_reply = msgspec.json.Decoder(RenderReply).decode


class TextPool:
    """Confined processes with a model's tokenizer.

    Raises `InputError` for work that exceeds the limits, and `penstock.confined.errors` for
    failures that are not the client's fault.
    """

    def __init__(self, tokenizer: Tokenizer, limits: Limits = LIMITS) -> None:
        self._special_tokens = tokenizer.special_tokens
        self.pool = ConfinedPool(ENTRY, tokenizer.to_json, limits)

    def encode_piece(self, piece: str, add_special_tokens: bool = False) -> list[int]:
        """As `Tokenizer.encode_piece`."""
        if len(piece) > MAX_PIECE_LENGTH:
            raise InputError(
                f"the text has a stretch of more than {MAX_PIECE_LENGTH} characters without a "
                "boundary to split at, such as a space after a word: send token ids"
            )
        need_turn()
        kind = ENCODE_WHOLE if add_special_tokens else ENCODE
        try:
            answer = run_confined(self.pool, kind + piece.encode())
        except (TooMuchMemory, TooMuchTime) as error:
            raise InputError(
                f"the text has a stretch of {len(piece)} characters that takes too long to "
                f"tokenize ({error}): send token ids"
            ) from error
        return array(ID_TYPE, answer).tolist()

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        """Render a conversation with a client's own template."""
        need_turn()
        given = [template, self._special_tokens, messages, options]
        job = json.dumps(given, default=dict).encode()
        try:
            reply = _read_reply(run_confined(self.pool, RENDER + job))
        except (TooMuchMemory, TooMuchTime) as error:
            raise InputError(
                f"chat_template exceeds its limits for these messages: {error}", "chat_template"
            ) from error
        if reply.error is not None:
            raise InputError(reply.error, reply.field)
        return reply.prompt

    def close(self) -> None:
        self.pool.close()
