"""Prepares pooling requests: texts, tokens or pairs of texts become engine requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.protocol.delta import EngineDelta
from penstock.protocol.errors import TRUNCATION, InputError, InputOverflow
from penstock.protocol.media import MediaItem
from penstock.protocol.pooling import Payload, PoolingInfo, PoolingParams
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import check_int
from penstock.text.dual import finish_text, place_image
from penstock.text.frontend import Frontend, check_salt
from penstock.text.prompts import Prompt, read_media, read_prompt
from penstock.text.scoring import DEFAULT_INSTRUCTION, check_instruction
from penstock.text.tokenizer import TooManyTokens

if TYPE_CHECKING:
    from penstock.media.content import MediaContent
    from penstock.media.frontend import Processed


@dataclass(frozen=True)
class Pair:
    """A query and a document, for a model that reads both at once."""

    query: str
    document: str
    instruction: str | None = None  # for the model's template, if it has one


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with images or videos."""

    prompt: str | Sequence[int]
    media: Sequence[MediaContent]


PoolingPrompt = str | Sequence[int] | Pair | MediaPrompt


@dataclass(frozen=True)
class PreparedInput:
    """An input's engine requests: one, or several for a long text."""

    pieces: list[EngineRequest]
    media: Sequence[Processed] = ()  # their files live as long as this


@dataclass(frozen=True)
class InputTruncation:
    """How a prompt that is too long is truncated. For a pair, the document is truncated."""

    num_tokens: int | None = None  # -1: what fits; None: too long is an error
    side: Literal["first", "last"] = "first"  # the side to keep
    max_query_tokens: int | None = None  # for a pair; 0 or None: no limit
    max_document_tokens: int | None = None
    max_text_tokens: int | None = None  # for a text, without its prompt and special tokens


@dataclass(frozen=True)
class InputOptions:
    """How an input is tokenized and run."""

    truncation: InputTruncation = InputTruncation()
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    field: str = "prompt"  # the user's name of the input, for errors


DEFAULT_OPTIONS = InputOptions()
A_LONGER_CONTEXT = "a larger max_model_len"  # prompts with media cannot be truncated


def read_pooling_prompt(prompt: Prompt) -> tuple[PoolingPrompt, str | None]:
    """A prompt of the Python API with its media, and its cache_salt."""
    given, cache_salt = read_prompt(prompt)
    media = read_media(prompt)
    return MediaPrompt(given, media) if media else given, cache_salt


def prepare_pooling(
    frontend: Frontend,
    request_id: str,
    prompt: PoolingPrompt,
    params: PoolingParams,
    options: InputOptions = DEFAULT_OPTIONS,
) -> PreparedInput:
    """Check and tokenize one request. `InputError` says what is wrong with it."""
    truncation, field = options.truncation, options.field
    info = pooling_info(frontend)
    params = msgspec.structs.replace(params)  # the user may change theirs meanwhile
    params.validate()
    params.task = info.check(params)
    check_int("priority", options.priority, -(2**63), 2**63 - 1)
    check_salt(options.cache_salt)
    limit = _limit(frontend, truncation)
    second_segment, num_unpooled = None, 0
    media: Sequence[Processed] = ()
    placed: list[MediaItem] = []
    if isinstance(prompt, MediaPrompt):
        media, token_ids, placed = _encode_media(frontend, prompt, params, options)
    elif isinstance(prompt, Pair):
        template = info.score_template
        check_instruction(info, prompt.instruction)
        encode = _encode_pair if template is None else partial(_encode_templated, template)
        token_ids, second_segment = encode(frontend, prompt, truncation, limit, field)
    elif isinstance(prompt, str):
        text = info.text_of(prompt, params)
        most = _max_tokens(frontend, params, truncation, options.add_special_tokens)
        if most is not None and most < limit:
            limit, truncation = most, replace(truncation, num_tokens=most)
        token_ids = _encode(frontend, text, replace(options, truncation=truncation), limit)
    else:
        _check_no_prompt_name(params)
        token_ids = list(prompt)
        if truncation.num_tokens is not None:
            token_ids = token_ids[:limit] if truncation.side == "first" else token_ids[-limit:]
        frontend.check_token_ids(token_ids, field)
    given = prompt.prompt if isinstance(prompt, MediaPrompt) else prompt
    if isinstance(given, str) and (before := info.unpooled_text(params)):
        num_unpooled = _num_unpooled(frontend, before, options.add_special_tokens)
        _check_cut(len(token_ids), num_unpooled, truncation, field)
    if not token_ids:
        raise InputError(f"{field} must contain at least one token, got none", field)
    if info.dual is not None and not placed:
        token_ids = finish_text(frontend, info.dual, token_ids, field)
    if len(token_ids) > frontend.max_model_len:
        option = A_LONGER_CONTEXT if placed else TRUNCATION
        raise InputOverflow(len(token_ids), frontend.max_model_len, field, option=option)
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        params=params,
        seed=0,
        priority=options.priority,
        arrival_time=time.monotonic(),
        cache_salt=options.cache_salt,
        # Where a token's own vector is wanted, or the sum of all, a cached prefix lacks them.
        read_prefix_cache=(
            info.reads_prefix_cache
            and params.task in ("embed", "classify")
            and params.vectors is None
        ),
        num_unpooled=num_unpooled,
        second_segment=second_segment,
        media=placed,
    )
    return PreparedInput([request], media)


def prepare_pieces(
    frontend: Frontend,
    request_id: str,
    prompt: PoolingPrompt,
    params: PoolingParams,
    options: InputOptions = DEFAULT_OPTIONS,
) -> PreparedInput:
    """Like `prepare_pooling`, but an input longer than the context may be embedded in pieces.

    `join_pieces` combines their vectors.
    """
    info = pooling_info(frontend)
    try:
        return prepare_pooling(frontend, request_id, prompt, params, options)
    except InputOverflow:
        if (
            isinstance(prompt, (Pair, MediaPrompt))
            or options.truncation.num_tokens is not None
            or params.vectors is not None
            or info.max_embed_len <= frontend.max_model_len
            or info.check(params) != "embed"
        ):
            raise
        pieces = _cut(frontend, prompt, params, options)
    raw = PoolingParams(task="embed", use_activation=False)
    own = replace(options, truncation=InputTruncation())
    return PreparedInput(
        [
            request
            for index, piece in enumerate(pieces)
            for request in prepare_pooling(
                frontend, f"{request_id}.{index}", piece, raw, own
            ).pieces
        ]
    )


def _cut(
    frontend: Frontend, prompt: str | Sequence[int], params: PoolingParams, options: InputOptions
) -> list[list[int]]:
    """Split a long input into pieces that fit, each with the special tokens around it."""
    info = pooling_info(frontend)
    before: list[int] = []
    after: list[int] = []
    if isinstance(prompt, str):
        tokenizer = frontend.known_tokenizer()
        before, after = tokenizer.frame(options.add_special_tokens) or ([], [])
        text = info.text_of(prompt, params)
        most = _max_tokens(frontend, params, options.truncation, False)
        longest = info.max_embed_len
        try:
            if most is not None and most < longest:
                token_ids = tokenizer.encode_part(text, most, "first", False, frontend.encode_piece)
            else:
                token_ids = tokenizer.encode(text, False, longest, frontend.encode_piece)
        except TooManyTokens as error:
            raise InputOverflow(error.num_tokens, longest, options.field, error.is_exact) from None
    else:
        token_ids = list(prompt)
        if len(token_ids) > info.max_embed_len:
            raise InputOverflow(len(token_ids), info.max_embed_len, options.field)
    room = max(frontend.max_model_len - len(before) - len(after), 1)
    return [[*before, *token_ids[at : at + room], *after] for at in range(0, len(token_ids), room)]


def join_pieces(
    info: PoolingInfo,
    params: PoolingParams,
    pieces: Sequence[EngineRequest],
    deltas: Sequence[EngineDelta],
) -> EngineDelta:
    """The result of an input from those of its pieces: the mean, weighted by tokens."""
    failed = next((delta for delta in deltas if delta.payload is None), None)
    if failed is not None or len(deltas) == 1:
        return failed or deltas[0]
    import numpy as np  # only if requested

    weights = np.array([len(piece.prompt_token_ids) for piece in pieces], np.float32)
    vectors = np.stack([delta.payload.to_numpy() for delta in deltas if delta.payload])
    mean = (weights / weights.sum()) @ vectors
    mean = mean[: params.dimensions]
    if info.normalizes if params.use_activation is None else params.use_activation:
        mean = mean / max(float(np.linalg.norm(mean)), 1e-12)
    payload = Payload(list(mean.shape), mean.astype(np.float32).tobytes())
    return msgspec.structs.replace(
        deltas[0],
        payload=payload,
        num_cached_tokens=sum(delta.num_cached_tokens for delta in deltas),
    )


def pooling_info(frontend: Frontend) -> PoolingInfo:
    """The model's pooling capabilities. Raises InputError for a generative model."""
    if frontend.pooling is None:
        raise InputError(
            "this model generates text and is not served for pooling: use the routes and methods "
            "of generation, or serve it with --runner pooling"
        )
    return frontend.pooling


def _limit(frontend: Frontend, truncation: InputTruncation) -> int:
    """Maximum tokens of a prompt."""
    longest, asked = frontend.max_model_len, truncation.num_tokens
    if asked is None or asked == -1:
        return longest
    name = "truncate_prompt_tokens"
    check_int(name, asked, -1, 2**31 - 1)
    if not 1 <= asked <= longest:
        raise InputError(
            f"{name} must be from 1 to max_model_len ({longest}), or -1 for as many as fit, got "
            f"{asked}",
            name,
        )
    return asked


def _max_tokens(
    frontend: Frontend, params: PoolingParams, truncation: InputTruncation, add_special_tokens: bool
) -> int | None:
    """How many tokens a text may have with its prompt, where there is a limit for the text."""
    if not truncation.max_text_tokens:
        return None
    before = pooling_info(frontend).text_of("", params)
    around = frontend.known_tokenizer().encode(before, add_special_tokens)
    return len(around) + truncation.max_text_tokens


def _encode(frontend: Frontend, text: str, options: InputOptions, limit: int) -> list[int]:
    tokenizer, special = frontend.known_tokenizer(), options.add_special_tokens
    try:
        return tokenizer.encode(text, special, limit, frontend.encode_piece)
    except TooManyTokens as error:
        if options.truncation.num_tokens is None:
            raise InputOverflow(error.num_tokens, limit, options.field, error.is_exact) from None
    side = options.truncation.side
    frame = tokenizer.frame(special)
    if frame is None:
        return tokenizer.encode_part(text, limit, side, special, frontend.encode_piece)
    before, after = frame
    num_special = len(before) + len(after)
    if num_special >= limit:
        raise InputError(
            f"truncate_prompt_tokens must be at least {num_special + 1}: this model puts "
            f"{num_special} tokens around a text",
            "truncate_prompt_tokens",
        )
    room = limit - num_special
    part = tokenizer.encode_part(text, room, side, False, frontend.encode_piece)
    return [*before, *part, *after]


def _encode_media(
    frontend: Frontend, prompt: MediaPrompt, params: PoolingParams, options: InputOptions
) -> tuple[list[Processed], list[int], list[MediaItem]]:
    """The processed media of a prompt, its tokens, and where the media are."""
    info, text = pooling_info(frontend), prompt.prompt
    if info.dual is not None:
        text = place_image(frontend, text, prompt.media, options.field)
    elif options.truncation.num_tokens is not None:
        raise InputError(
            "truncate_prompt_tokens cannot be combined with images: leave one out",
            "truncate_prompt_tokens",
        )
    if isinstance(text, str):
        text = info.text_of(text, params)
    else:
        _check_no_prompt_name(params)
        frontend.check_token_ids(text, options.field)
    limit = frontend.max_model_len
    try:
        return frontend.tokenize(text, options.add_special_tokens, limit, prompt.media)
    except TooManyTokens as error:
        raise InputOverflow(
            error.num_tokens, limit, options.field, error.is_exact, A_LONGER_CONTEXT
        ) from None


def _check_no_prompt_name(params: PoolingParams) -> None:
    if params.prompt_name is not None:
        raise InputError("prompt_name is for texts, not for token ids", "prompt_name")


def _num_unpooled(frontend: Frontend, before: str, add_special_tokens: bool) -> int:
    """The tokens of what stands before a text, with those in front of it, as
    sentence-transformers counts them: it tokenizes the prompt alone."""
    tokenizer = frontend.known_tokenizer()
    token_ids = tokenizer.encode(before, add_special_tokens)
    _, after = tokenizer.frame(add_special_tokens) or ([], [])
    return len(token_ids) - (token_ids[-1] in {*tokenizer.special_ids, *after[-1:]})


def _check_cut(num_tokens: int, num_unpooled: int, truncation: InputTruncation, field: str) -> None:
    if truncation.num_tokens is not None and truncation.side == "last":
        raise InputError(
            "truncation_side must be right: left would cut off the prompt that stands before the "
            "text",
            "truncation_side",
        )
    if num_unpooled >= num_tokens:
        raise InputError(
            f"the model's prompt has {num_unpooled} tokens, which are not pooled, and leaves none "
            "of the text: allow more tokens",
            field,
        )


def _encode_pair(
    frontend: Frontend, pair: Pair, truncation: InputTruncation, limit: int, field: str
) -> tuple[list[int], int | None]:
    """The pair's tokens, and where the second segment begins if the model uses segments."""
    tokenizer = frontend.known_tokenizer()
    frame = tokenizer.pair_frame

    def part(text: str, most: int | None) -> list[int]:
        if most:
            return tokenizer.encode_part(text, most, "first", False, frontend.encode_piece)
        return tokenizer.encode(text, False, None, frontend.encode_piece)

    query = part(pair.query, truncation.max_query_tokens)
    num_other = len(frame.before) + len(query) + len(frame.between) + len(frame.after)
    room = limit - num_other
    if truncation.num_tokens is not None and room < 1:
        raise InputError(
            f"the query has {len(query)} tokens, which leaves no room for a document within "
            f"{limit} tokens: shorten it, or set max_tokens_per_query",
            "query",
        )
    most = truncation.max_document_tokens or None
    if truncation.num_tokens is not None:
        most = room if most is None else min(room, most)
    document = part(pair.document, most)
    if num_other + len(document) > limit:
        raise InputOverflow(num_other + len(document), limit, field)
    begin = [*frame.before, *query, *frame.between]
    return [*begin, *document, *frame.after], len(begin) if frame.has_segments else None


def _encode_templated(
    template: str,
    frontend: Frontend,
    pair: Pair,
    truncation: InputTruncation,
    limit: int,
    field: str,
) -> tuple[list[int], None]:
    """The tokens of a pair's template. If it is too long, the end of the document is cut."""
    tokenizer = frontend.known_tokenizer()

    def cut(text: str, most: int | None) -> str:
        if not most:
            return text
        kept = tokenizer.encode_part(text, most, "first", False, frontend.encode_piece)
        return tokenizer.decode(kept, skip_special_tokens=False)

    head, _, tail = template.partition("{document}")
    usual = pooling_info(frontend).score_instruction or DEFAULT_INSTRUCTION
    head = head.replace("{instruction}", pair.instruction or usual)
    head = head.replace("{query}", cut(pair.query, truncation.max_query_tokens))
    text = head + cut(pair.document, truncation.max_document_tokens)
    after = tokenizer.encode(tail, False)
    room = limit - len(after)
    if truncation.num_tokens is not None:
        num_head = len(tokenizer.encode(head, False, None, frontend.encode_piece))
        if num_head >= room:
            raise InputError(
                f"the query and the template have {num_head + len(after)} tokens, which leaves no "
                f"room for a document within {limit} tokens: shorten it, or set "
                "max_tokens_per_query",
                "query",
            )
        before = tokenizer.encode_part(text, room, "first", False, frontend.encode_piece)
    else:
        before = tokenizer.encode(text, False, None, frontend.encode_piece)
    if len(before) > room:
        raise InputOverflow(len(before) + len(after), limit, field)
    return [*before, *after], None
