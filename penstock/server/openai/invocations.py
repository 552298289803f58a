"""POST /invocations: SageMaker's route. The body decides which API answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
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
from penstock.server.pooling.embeddings import create_embedding
from penstock.server.pooling.protocol import (
    EmbeddingList,
    EmbeddingRequest,
    RerankReply,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from penstock.server.pooling.scores import FIRST_NAMES, create_score, rerank

router = APIRouter(tags=["Operations"], route_class=JsonRoute)

# Not identifiers, so that errors leave them out of a field's path.
CHAT, TEXT, EMBEDDING = "chat-completion", "text-completion", "an-embedding"
RERANKING, SCORE = "a-reranking", "a-score"
KIND_OF_FIELD = {
    "messages": CHAT,
    "prompt": TEXT,
    "input": EMBEDDING,
    "query": RERANKING,
    **dict.fromkeys(FIRST_NAMES, SCORE),
}
HANDLERS: dict[type, Callable[[Any, Request], Awaitable[Response]]] = {
    ChatCompletionRequest: create_chat_completion,
    CompletionRequest: create_completion,
    EmbeddingRequest: create_embedding,
    RerankRequest: rerank,
    ScoreRequest: create_score,
}


def _kind(body: Any) -> str:
    fields = body if isinstance(body, Mapping) else ()
    return next((kind for field, kind in KIND_OF_FIELD.items() if field in fields), TEXT)


class Invocation(RootModel[Any]):
    """The body of the API whose field it has: `messages`, `prompt`, `input`, `query`, `text_1`."""

    root: Annotated[
        Annotated[ChatCompletionRequest, Tag(CHAT)]
        | Annotated[CompletionRequest, Tag(TEXT)]
        | Annotated[EmbeddingRequest, Tag(EMBEDDING)]
        | Annotated[RerankRequest, Tag(RERANKING)]
        | Annotated[ScoreRequest, Tag(SCORE)],
        Discriminator(_kind),
    ]


@router.post(
    "/invocations",
    response_model=ChatCompletion | Completion | EmbeddingList | RerankReply | ScoreList,
    responses=ANSWERS,
)
async def invoke(body: Invocation, request: Request) -> Response:
    """Answer `messages` or a `prompt`, embed an `input`, rerank for a `query`, or score pairs."""
    return await HANDLERS[type(body.root)](body.root, request)
