"""POST /v2/embed: embeddings in the format of Cohere's API."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from penstock.protocol.delta import EngineDelta
from penstock.protocol.errors import InputError
from penstock.protocol.pooling import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    PoolingInfo,
    PoolingParams,
)
from penstock.protocol.request import EngineRequest
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.replies import json_response, unless_gone
from penstock.server.pooling.embeddings import ERRORS
from penstock.server.pooling.inputs import prepare_with
from penstock.server.pooling.protocol import CohereEmbeddings, CohereEmbedRequest
from penstock.server.pooling.run import pool_all
from penstock.server.pooling.vectors import as_bytes, vector_of
from penstock.server.service import Service
from penstock.text.pooling import InputOptions, InputTruncation, pooling_info

router = APIRouter(tags=["Pooling"], route_class=JsonRoute)

TYPES = ("float", "base64", "binary", "ubinary")
BYTES = ("int8", "uint8")  # need a calibration of ranges, which models' files do not have
# Models' prompt names for Cohere's input types.
PROMPT_NAMES = {"search_query": QUERY_PROMPTS, "search_document": DOCUMENT_PROMPTS}


@router.post("/v2/embed", response_model=CohereEmbeddings, responses=ERRORS)
async def embed(body: CohereEmbedRequest, request: Request) -> Response:
    """Embed texts."""
    service: Service = request.app.state.service
    await service.check_model(body.model)
    service.check_pools()
    service.check_capacity()
    if not body.texts:
        raise InputError("texts must not be empty: give at least one text", "texts")
    for index, text in enumerate(body.texts):
        if not text:
            raise InputError(f"texts[{index}] must not be empty: leave it out", "texts")
    kinds = body.embedding_types or ["float"]
    for kind in kinds:
        if kind not in TYPES:
            remedy = ": for 8 bits, ask for float and quantize" if kind in BYTES else ""
            raise InputError(
                f"embedding_types may contain {', '.join(TYPES)}, got {kind!r:.80}{remedy}",
                "embedding_types",
            )
    info = pooling_info(service.frontend)
    try:
        params = PoolingParams(
            task="embed",
            dimensions=body.output_dimension,
            prompt_name=_prompt_name(info, body.input_type),
        )
        info.check(params, "model")
    except InputError as error:
        if error.field != "dimensions":
            raise
        message = str(error).replace("dimensions", "output_dimension", 1)  # Cohere's name of it
        raise InputError(message, "output_dimension") from error
    request_id, texts = f"embd-{request.state.request_id}", body.texts
    truncation = InputTruncation(
        None if body.truncate == "NONE" else -1, "last" if body.truncate == "START" else "first"
    )
    options = InputOptions(truncation, priority=body.priority or 0, field="texts")
    prepare = prepare_with(service, request_id, params, options)

    async def work() -> bytes:
        requests, deltas = await pool_all(service, prepare, texts, params)
        return await service.in_thread(_write, request_id, texts, kinds, requests, deltas)

    return json_response(await unless_gone(request, work()))


def _prompt_name(info: PoolingInfo, input_type: str | None) -> str | None:
    """The name of the model's prompt for this input type, or None."""
    names = PROMPT_NAMES.get(input_type or "", (input_type or "",))
    return info.first_prompt(names)


def _write(
    request_id: str,
    texts: Sequence[str],
    kinds: Sequence[str],
    requests: Sequence[EngineRequest],
    deltas: Sequence[EngineDelta],
) -> bytes:
    num_tokens = sum(len(request.prompt_token_ids) for request in requests)
    return msgspec.json.encode(
        {
            "id": request_id,
            "response_type": "embeddings_by_type",
            "embeddings": {
                kind: [_as_type(vector_of(delta), kind) for delta in deltas] for kind in kinds
            },
            "texts": texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": num_tokens},
            },
        }
    )


def _as_type(vector: Any, kind: str) -> Any:
    import numpy as np  # imported only when requested

    if kind == "float":
        return vector.tolist()
    if kind == "base64":
        return base64.b64encode(as_bytes(vector, "float32")).decode()
    bits = np.packbits(vector > 0)
    return bits.tolist() if kind == "ubinary" else (bits.astype(np.int16) - 128).tolist()
