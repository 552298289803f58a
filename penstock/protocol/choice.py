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
    params = request.sampling
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
    rule = f"must leave a token that is not forbidden by {' or '.join(causes)}"
    field = "allowed_token_ids"
    if params.allowed_token_ids is None:
        field = "stop_token_ids" if by_length else "bad_words"
    return InputError(f"{field} {rule.rstrip(',')}: {_when(num_output)} there is none", field)


def why_no_token_of_grammar(request: EngineRequest, num_output: int) -> InputError | None:
    """The same for a request that failed, where a grammar may have forbidden the rest.

    None: nothing but the grammar restricts it, and a grammar by itself always leaves a token.
    """
    params = request.sampling
    if params.structured_outputs is None:
        return None
    restricts = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(request.bad_words_token_ids),
        "min_tokens": num_output < params.min_tokens,
    }
    fields = " and ".join(name for name, is_used in restricts.items() if is_used)
    if not fields:
        return None
    return InputError(
        f"structured_outputs needs a token that {fields} forbid: {_when(num_output)} there is no "
        "other; loosen one of them",
        "structured_outputs",
    )


def _when(num_output: int) -> str:
    if num_output == 0:
        return "to begin with"
    return f"after {num_output} token{'s' * (num_output > 1)} of output"


def _ends_of_words(words: Sequence[Sequence[int]], token_ids: Sequence[int]) -> set[int]:
    """The tokens that would complete one of `words`."""
    ends = set()
    for word in words:
        start = word[:-1]
        if word and list(token_ids[len(token_ids) - len(start) :]) == list(start):
            ends.add(word[-1])
    return ends
