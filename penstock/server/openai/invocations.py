"""POST /invocations: SageMaker's route. The body decides which API answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, RootModel, Tag

from penstock.server.http.bodies import JsonRoute
from penstock.server.openai.chat import create_chat_completion
from penstock.server.openai.completions import create_completion
from penstock.server.openai.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
)
from penstock.server.openai.stream import ANSWERS

router = APIRouter(tags=["Operations"], route_class=JsonRoute)

# Not identifiers, so that errors leave them out of a field's path.
CHAT, TEXT = "chat-completion", "text-completion"


def _kind(body: Any) -> str:
    has_messages = "messages" in body if isinstance(body, Mapping) else hasattr(body, "messages")
    return CHAT if has_messages else TEXT


class Invocation(RootModel[Any]):
    """The body of a chat completion if it has `messages`, else of a completion."""

    root: Annotated[
        Annotated[ChatCompletionRequest, Tag(CHAT)] | Annotated[CompletionRequest, Tag(TEXT)],
        Discriminator(_kind),
    ]


@router.post(
    "/invocations",
    response_model=ChatCompletion | Completion,
    responses=ANSWERS,
)
async def invoke(body: Invocation, request: Request) -> Response:
    """Create a chat completion for `messages`, or a completion for a `prompt`."""
    if isinstance(body.root, ChatCompletionRequest):
        return await create_chat_completion(body.root, request)
    return await create_completion(body.root, request)
