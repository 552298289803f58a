"""What a request's own restrictions leave to choose from, where they may leave nothing."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.errors import InputError
from penstock.protocol.request import EngineRequest


def why_no_token(
    request: EngineRequest, token_ids: Sequence[int], vocab_size: int
) -> InputError | None:
    """What to tell a client whose request forbids every token after `token_ids`.

    Those are its prompt and its output so far. None: there are tokens left.
    """
    params = request.params
    num_output = len(token_ids) - len(request.prompt_token_ids)
    by_words = _ends_of_words(request.bad_words_token_ids, token_ids)
    by_length: set[int] = set()
    if num_output < params.min_tokens:
        by_length.update(params.stop_token_ids or ())
        by_length.update(() if params.ignore_eos else request.eos_token_ids)
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if any(token_id not in by_words and token_id not in by_length for token_id in allowed):
        return None
    causes = []
    if not by_words.isdisjoint(allowed):
        causes.append("bad_words")
    if not by_length.isdisjoint(allowed):
        causes.append("min_tokens, which puts off the tokens that end a text,")
    when = f"after {num_output} token{'s' * (num_output > 1)} of output"
    when = when if num_output else "to begin with"
    rule = f"must leave a token that is not forbidden by {' or '.join(causes)}"
    field = "allowed_token_ids"
    if params.allowed_token_ids is None:
        field = "stop_token_ids" if by_length else "bad_words"
    return InputError(f"{field} {rule.rstrip(',')}: {when} there is none", field)


def _ends_of_words(words: Sequence[Sequence[int]], token_ids: Sequence[int]) -> set[int]:
    """The tokens that would complete one of `words`."""
    ends = set()
    for word in words:
        start = word[:-1]
        if word and list(token_ids[len(token_ids) - len(start) :]) == list(start):
            ends.add(word[-1])
    return ends
