"""Converts bodies to pooling requests for the engine. Called in threads: tokenizing is slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized

from penstock.conversation.pooling import pooling_prompt
from penstock.protocol.errors import InputError
from penstock.protocol.pooling import PoolingParams
from penstock.server.openai.prompts import turn_request
from penstock.server.pooling.protocol import InputBody, PairBody
from penstock.server.service import Service
from penstock.text.pooling import (
    InputOptions,
    InputTruncation,
    PoolingPrompt,
    PreparedInput,
    pooling_info,
    prepare_pieces,
)

Prepare = Callable[[PoolingPrompt], PreparedInput]


def read_inputs(body: InputBody, field: str = "input") -> Sequence[PoolingPrompt]:
    """Read and check the inputs. Returns [] if the request has messages instead."""
    given = body.input
    if (given is None) == (body.messages is None):
        raise InputError(f"give either {field} or messages", field)
    if given is None:
        return []
    if len(given) == 0:
        raise _no_items(field)
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    check_not_empty(given, field)
    return given


def check_not_empty(items: Sequence[Sized], field: str) -> None:
    """Refuse a list without items, and empty items."""
    if not items:
        raise _no_items(field)
    for index, item in enumerate(items):
        if len(item) == 0:
            raise InputError(f"{field}[{index}] must not be empty: leave it out", field)


def _no_items(field: str) -> InputError:
    return InputError(f"{field} must not be empty: give at least one text", field)


def prepare_with(
    service: Service, request_id: str, params: PoolingParams, options: InputOptions
) -> Prepare:
    """Return a function that converts one prompt to engine requests with these options."""

    def prepare(prompt: PoolingPrompt) -> PreparedInput:
        own_id = service.engine_id(request_id)
        return prepare_pieces(service.frontend, own_id, prompt, params, options)

    return prepare


def input_prepare(
    service: Service, body: InputBody, params: PoolingParams, request_id: str
) -> Prepare:
    """Return a function that converts one input to engine requests."""
    body.refuse_foreign()
    is_chat = body.messages is not None
    is_rendered = is_chat and pooling_info(service.frontend).dual is None
    special = body.add_special_tokens
    options = InputOptions(
        InputTruncation(
            body.truncate_prompt_tokens, "last" if body.truncation_side == "left" else "first"
        ),
        (not is_rendered) if special is None else special,
        body.priority or 0,
        body.cache_salt,
        "messages" if is_chat else "input",
    )
    return prepare_with(service, request_id, params, options)


def render_messages(service: Service, body: InputBody) -> PoolingPrompt:
    """Render the body's conversation."""
    assert body.messages is not None
    turn = turn_request(
        body.model_copy(update={"add_generation_prompt": bool(body.add_generation_prompt)}),
        body.messages,
        service.frontend.default_params,
    )
    return pooling_prompt(service.frontend, turn)


def pair_prepare(
    service: Service,
    body: PairBody,
    params: PoolingParams,
    request_id: str,
    field: str,
    max_text_tokens: int | None = None,
) -> Prepare:
    """Return a function that converts a pair, or one text of it, to engine requests."""
    body.refuse_foreign()
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        value = getattr(body, name)
        if value is not None and value < 0:
            raise InputError(f"{name} must be at least 0, got {value}", name)
    truncation = InputTruncation(
        body.truncate_prompt_tokens,
        "first",
        body.max_tokens_per_query,
        body.max_tokens_per_doc,
        max_text_tokens,
    )
    options = InputOptions(
        truncation, priority=body.priority or 0, cache_salt=body.cache_salt, field=field
    )
    return prepare_with(service, request_id, params, options)
