"""POST /tokenize and /detokenize."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from penstock.conversation.prepare import tokenize_turn
from penstock.protocol.errors import InputError
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.errors import describe_errors
from penstock.server.http.replies import json_response, unless_gone
from penstock.server.openai.prompts import turn_request
from penstock.server.openai.protocol import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
)
from penstock.server.service import Service
from penstock.text.frontend import Frontend
from penstock.text.renderers.base import FamilyRenderer
from penstock.text.tokenizer import Tokenizer, read_json_if_there

router = APIRouter(tags=["Tokenizer"], route_class=JsonRoute)
info_router = APIRouter(tags=["Tokenizer"])  # only if the operator enables it


@router.post(
    "/tokenize", response_model=TokenizeReply, responses=describe_errors(400, 401, 404, 413)
)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Tokenize a prompt, or a conversation as rendered by the chat template."""
    service: Service = request.app.state.service
    await service.check_model(body.model)
    # Serialized in the thread: millions of tokens would block the event loop.
    writing = service.in_thread(lambda: _tokenize(service, body).model_dump_json())
    return json_response(await unless_gone(request, writing))


@info_router.get(
    "/tokenizer_info", response_model=dict[str, Any], responses=describe_errors(400, 401)
)
async def tokenizer_info(request: Request) -> Response:
    """Show the tokenizer's configuration, special tokens and chat template."""
    service: Service = request.app.state.service
    tokenizer = _tokenizer(service.frontend)
    info: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.folder is not None:
        info |= read_json_if_there(tokenizer.folder / "tokenizer_config.json")
    info |= tokenizer.special_tokens
    renderer = service.frontend.renderer
    if renderer is not None and not isinstance(renderer, FamilyRenderer):
        info["chat_template"] = renderer.source
    info["vocab_size"] = tokenizer.vocab_size
    info["max_model_len"] = service.frontend.max_model_len
    return json_response(json.dumps(info))


@router.post("/detokenize", responses=describe_errors(400, 401, 404, 413))
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeReply:
    """Convert token IDs to text."""
    service: Service = request.app.state.service
    await service.check_model(body.model)
    return await service.in_thread(_detokenize, service.frontend, body)


def _tokenize(service: Service, body: TokenizeRequest) -> TokenizeReply:
    frontend = service.frontend
    tokenizer = _tokenizer(frontend)
    if (body.prompt is None) == (body.messages is None):
        raise InputError("give either prompt or messages", "prompt")
    if body.messages is not None:
        turn = turn_request(body, body.messages, frontend.default_params)
        token_ids = tokenize_turn(frontend, turn, service.max_counted_tokens)
    else:
        assert body.prompt is not None
        adds = body.add_special_tokens is not False
        token_ids = frontend.encode(body.prompt, adds, service.max_counted_tokens)
    strings = [tokenizer.token_spelling(i) for i in token_ids] if body.return_token_strs else None
    return TokenizeReply(
        count=len(token_ids),
        max_model_len=frontend.max_model_len,
        tokens=token_ids,
        token_strs=strings,
    )


def _detokenize(frontend: Frontend, body: DetokenizeRequest) -> DetokenizeReply:
    tokenizer = _tokenizer(frontend)
    size = tokenizer.vocab_size
    for token_id in body.tokens:
        if token_id >= size:
            raise InputError(
                f"tokens must contain token ids from 0 to {size - 1}, got {token_id}", "tokens"
            )
    return DetokenizeReply(prompt=tokenizer.decode(body.tokens, bool(body.skip_special_tokens)))


def _tokenizer(frontend: Frontend) -> Tokenizer:
    if frontend.tokenizer is None:
        raise InputError("this server has no tokenizer: it runs with --skip-tokenizer-init")
    return frontend.tokenizer
