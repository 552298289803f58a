"""POST /score and /rerank, with all of their aliases: scores of text pairs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from penstock.protocol.errors import InputError
from penstock.protocol.pooling import PoolingParams
from penstock.protocol.request import EngineRequest
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.replies import json_response, unless_gone
from penstock.server.pooling.embeddings import ERRORS
from penstock.server.pooling.inputs import check_not_empty, pair_prepare
from penstock.server.pooling.protocol import (
    PairBody,
    RerankReply,
    RerankRequest,
    RerankResult,
    RerankResultDocument,
    Score,
    ScoreList,
    ScoreRequest,
)
from penstock.server.pooling.run import pool_all
from penstock.server.pooling.vectors import usage_of, vector_of
from penstock.server.service import Service
from penstock.text.pooling import Pair, pooling_info
from penstock.text.scoring import (
    check_instruction,
    pair_up,
    score_kind,
    similarity,
    with_prompts,
)

router = APIRouter(tags=["Pooling"], route_class=JsonRoute)

FIRST_NAMES = ("text_1", "queries", "data_1")
SECOND_NAMES = ("text_2", "documents", "items", "data_2")


@router.post("/score", response_model=ScoreList, responses=ERRORS)
@router.post("/v1/score", response_model=ScoreList, responses=ERRORS)
async def create_score(body: ScoreRequest, request: Request) -> Response:
    """Score text pairs: one text against several, or pairwise."""
    service: Service = request.app.state.service
    model = await service.check_model(body.model)
    first = _texts(body, FIRST_NAMES)
    second = _texts(body, SECOND_NAMES)
    try:
        pairs = pair_up(first, second)
    except InputError as error:
        raise InputError(str(error), "text_1") from error
    request_id = f"score-{body.request_id or request.state.request_id}"
    found = await unless_gone(request, _score(service, body, pairs, request_id, "text_2"))
    scores, requests = found
    return json_response(
        ScoreList(
            id=request_id,
            object="list",
            created=int(time.time()),
            model=model,
            data=[
                Score(object="score", index=index, score=score)
                for index, score in enumerate(scores)
            ],
            usage=usage_of(requests),
        )
    )


@router.post("/rerank", response_model=RerankReply, responses=ERRORS)
@router.post("/v1/rerank", response_model=RerankReply, responses=ERRORS)
@router.post("/v2/rerank", response_model=RerankReply, responses=ERRORS)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Rerank documents by relevance to a query (Jina and Cohere formats)."""
    service: Service = request.app.state.service
    model = await service.check_model(body.model)
    request_id = f"rerank-{body.request_id or request.state.request_id}"
    if body.top_n is not None and body.top_n < 0:
        raise InputError(
            f"top_n must be at least 0, got {body.top_n}: 0 or none gives all documents", "top_n"
        )
    documents = [item if isinstance(item, str) else item.text for item in body.documents]
    check_not_empty(documents, "documents")
    if not body.query:
        raise InputError("query must not be empty", "query")
    pairs = pair_up([body.query], documents)
    found = await unless_gone(request, _score(service, body, pairs, request_id, "documents"))
    scores, requests = found
    best = sorted(range(len(scores)), key=lambda index: -scores[index])  # stable
    results = []
    for index in best[: body.top_n or None]:
        result = RerankResult(index=index, relevance_score=scores[index])
        if body.return_documents is not False:
            result.document = RerankResultDocument(text=documents[index])
        results.append(result)
    return json_response(
        RerankReply(id=request_id, model=model, results=results, usage=usage_of(requests))
    )


async def _score(
    service: Service,
    body: PairBody,
    pairs: Sequence[tuple[str, str]],
    request_id: str,
    field: str,
) -> tuple[list[float], list[EngineRequest]]:
    """Return the score of each pair, and the engine requests."""
    service.check_pools()
    service.check_capacity()
    info = pooling_info(service.frontend)
    if score_kind(info) == "cross-encoder":
        params = PoolingParams(task="classify", use_activation=body.use_activation)
        prepare = pair_prepare(service, body, params, request_id, field)
        prompts = [Pair(query, document, body.instruction) for query, document in pairs]
        requests, deltas = await pool_all(service, prepare, prompts, params, body.timeout)
        return [float(vector_of(delta)[0]) for delta in deltas], requests
    check_instruction(info, body.instruction)
    compared = with_prompts(info, pairs, body.max_tokens_per_query, body.max_tokens_per_doc)
    texts = list(dict.fromkeys(text for pair in compared for text in pair))
    by_role = {
        text[1:]: pair_prepare(service, body, text.params, request_id, field, text.max_tokens)
        for text in compared[0]
    }
    requests, deltas = await pool_all(
        service,
        lambda item: by_role[item[1:]](item.text),
        texts,
        PoolingParams(task="embed"),
        body.timeout,
    )
    vectors = {text: vector_of(delta) for text, delta in zip(texts, deltas, strict=True)}
    return [similarity(vectors[first], vectors[second]) for first, second in compared], requests


def _texts(body: ScoreRequest, names: Sequence[str]) -> list[str]:
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise InputError(
            f"give one of {', '.join(names)}, got {' and '.join(given) or 'none'}",
            given[0] if given else names[0],
        )
    value = getattr(body, given[0])
    texts = [value] if isinstance(value, str) else list(value)
    check_not_empty(texts, given[0])
    return texts
