"""POST /v1/chat/completions/batch: several conversations in one request."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from penstock.conversation.output import TurnUsage
from penstock.protocol.errors import InputError
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.replies import gather, json_response, unless_gone
from penstock.server.openai.chat import ChatAnswer
from penstock.server.openai.logprobs import chat_usage
from penstock.server.openai.prompts import prepare_chat
from penstock.server.openai.protocol import (
    ChatBatchRequest,
    ChatCompletion,
    ChatCompletionRequest,
)
from penstock.server.openai.stream import ERRORS, Exchange
from penstock.server.service import Service
from penstock.server.turn import Turn

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


@router.post("/v1/chat/completions/batch", response_model=ChatCompletion, responses=ERRORS)
async def create_chat_batch(body: ChatBatchRequest, request: Request) -> Response:
    """Create a chat completion for each of several conversations: choice i answers the i-th."""
    service: Service = request.app.state.service
    model = await service.admit(body.model)
    _check(service, body)
    request_id = "chatcmpl-" + (body.request_id or request.state.request_id)
    bodies = _single_bodies(body)
    turns = await unless_gone(request, _prepare_all(service, bodies, request_id))
    answers = [
        ChatAnswer(Exchange(service, single, model, request_id), turn).whole()
        for single, turn in zip(bodies, turns, strict=True)
    ]
    completions = await unless_gone(request, gather(*answers))
    return json_response(_join(service, completions, turns))


def _check(service: Service, body: ChatBatchRequest) -> None:
    if body.stream:
        raise InputError("stream must be off: batch requests cannot be streamed", "stream")
    if body.n not in (None, 1):
        raise InputError(f"n must be 1: each conversation has one choice, got {body.n}", "n")
    num, most = len(body.messages), service.server_config.max_prompts
    if num > most:
        raise InputError(
            f"messages may contain at most {most} conversations, got {num}", "messages"
        )
    service.check_size(num, "messages")


def _single_bodies(body: ChatBatchRequest) -> Sequence[ChatCompletionRequest]:
    """Split the batch into one body per conversation."""
    common = {name: value for name, value in body if name != "messages"}
    names = body.model_fields_set
    return [
        ChatCompletionRequest.model_construct(names, messages=conversation, **common)
        for conversation in body.messages
    ]


async def _prepare_all(
    service: Service, bodies: Sequence[ChatCompletionRequest], request_id: str
) -> list[Turn]:
    """Prepare the turns one by one, so that other requests get their turn in between."""
    first: Turn = await service.in_thread(prepare_chat, service, bodies[0], request_id)
    first.check_weight(len(bodies), "messages")
    others = [
        await service.in_thread(prepare_chat, service, body, request_id) for body in bodies[1:]
    ]
    return [first, *others]


def _join(
    service: Service, completions: Sequence[ChatCompletion], turns: Sequence[Turn]
) -> ChatCompletion:
    joined = completions[0]
    for index, completion in enumerate(completions[1:], start=1):
        (choice,) = completion.choices
        choice.index = index
        joined.choices.append(choice)
    total = TurnUsage()
    for turn in turns:
        total.add(turn.usage)
    joined.usage = chat_usage(total, service.server_config.enable_prompt_tokens_details)
    joined.prompt_logprobs = joined.prompt_token_ids = None  # there are several prompts
    return joined
