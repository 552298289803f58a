"""Formats logprobs for chat completions and completions, and usage."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.conversation.output import TurnUsage
from penstock.protocol.outputs import Logprob, LogprobsAtPosition
from penstock.server.openai.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    CompletionTokensDetails,
    MediaTokensDetails,
    PromptLogprobs,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no infinity


class LogprobFormat:
    """Formats the logprobs of one request."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_token_ids = as_token_ids

    def chat(self, positions: Sequence[LogprobsAtPosition]) -> ChatLogprobs:
        content = []
        for position in positions:
            chosen_id, chosen = next(iter(position.items()))
            content.append(
                ChatTokenLogprob(
                    token=self._text(chosen_id, chosen),
                    logprob=_finite(chosen),
                    bytes=self._bytes(chosen_id),
                    top_logprobs=[
                        TopLogprob(
                            token=self._text(token_id, entry),
                            logprob=_finite(entry),
                            bytes=self._bytes(token_id),
                        )
                        for token_id, entry in self._top(position)
                    ],
                )
            )
        return ChatLogprobs(content=content)

    def completion(
        self,
        token_ids: Sequence[int],
        positions: Sequence[LogprobsAtPosition | None],
        text_offsets: list[int],
    ) -> CompletionLogprobs:
        """Format logprobs for completions. `text_offsets` are the tokens' offsets in the text."""
        made = CompletionLogprobs(
            tokens=[], token_logprobs=[], top_logprobs=[], text_offset=text_offsets
        )
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = Logprob(0.0, None, self._decode(token_id))
            if position is None:  # a prompt's first token has no logprob
                made.token_logprobs.append(None)
                made.top_logprobs.append(None)
            else:
                chosen = position[token_id]
                made.token_logprobs.append(_finite(chosen))
                top = {self._text(token_id, chosen): _finite(chosen)}
                for other_id, other in self._top(position):  # several tokens may have the same text
                    top.setdefault(self._text(other_id, other), _finite(other))
                made.top_logprobs.append(top)
            made.tokens.append(self._text(token_id, chosen))
        return made

    def _top(self, position: LogprobsAtPosition) -> list[tuple[int, Logprob]]:
        """The top tokens, the most likely first."""
        if self._num_top == 0:
            return []
        ranked = sorted(position.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
        return ranked if self._num_top < 0 else ranked[: self._num_top]

    def _text(self, token_id: int, entry: Logprob) -> str:
        if self._as_token_ids or entry.decoded_token is None:
            return f"token_id:{token_id}"
        return entry.decoded_token

    def _decode(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def _bytes(self, token_id: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


class TextOffsets:
    """Computes the offsets of tokens in a streamed text, in characters.

    Tokens that are parts of one character begin where the character does. A token that is not shown
    begins where the next one does. `detokenizer` is None if there is no text.
    """

    def __init__(self, detokenizer: Detokenizer | None, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self.num_chars = start  # so far

    def take(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self.num_chars)
            if self._detokenizer is not None:
                self.num_chars += len(self._detokenizer.add([token_id]))
        return offsets


def prompt_offsets(tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str) -> list[int]:
    """Return the offsets of a prompt's tokens. Special tokens before its text have offset 0."""
    counted = TextOffsets(tokenizer.detokenizer((), False) if tokenizer is not None else None)
    offsets = counted.take(token_ids)
    num_added = counted.num_chars - len(text)
    return [max(offset - num_added, 0) for offset in offsets]


def prompt_logprobs(positions: Sequence[LogprobsAtPosition | None]) -> PromptLogprobs:
    return [
        None
        if position is None
        else {
            token_id: TokenLogprob(
                logprob=_finite(entry), rank=entry.rank, decoded_token=entry.decoded_token
            )
            for token_id, entry in position.items()
        }
        for position in positions
    ]


def usage(counted: TurnUsage, with_details: bool) -> Usage:
    details: PromptTokensDetails | None = None
    if with_details and (counted.num_image or counted.num_video):
        details = MediaTokensDetails(
            cached_tokens=counted.num_cached,
            image_tokens=counted.num_image,
            video_tokens=counted.num_video,
        )
    elif with_details:
        details = PromptTokensDetails(cached_tokens=counted.num_cached)
    return Usage(
        prompt_tokens=counted.num_prompt,
        completion_tokens=counted.num_completion,
        total_tokens=counted.num_total,
        prompt_tokens_details=details,
    )


def chat_usage(counted: TurnUsage, with_details: bool) -> Usage:
    made = usage(counted, with_details)
    made.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=counted.num_reasoning)
    return made


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)
