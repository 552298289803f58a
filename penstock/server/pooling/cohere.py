"""POST /v2/embed: embeddings in the format of Cohere's API."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from penstock.conversation.media import MediaReference
from penstock.conversation.pooling import pooling_prompt
from penstock.conversation.request import TurnRequest
from penstock.protocol.delta import EngineDelta
from penstock.protocol.errors import InputError, InputOverflow
from penstock.protocol.pooling import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    PoolingInfo,
    PoolingParams,
)
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.replies import json_response, unless_gone
from penstock.server.pooling.embeddings import ERRORS
from penstock.server.pooling.inputs import check_not_empty, prepare_with
from penstock.server.pooling.protocol import CohereEmbeddings, CohereEmbedRequest, CohereInput
from penstock.server.pooling.run import pool_all
from penstock.server.pooling.vectors import as_bytes, vector_of
from penstock.server.service import Service
from penstock.text.pooling import (
    A_LONGER_CONTEXT,
    InputOptions,
    InputTruncation,
    PreparedInput,
    pooling_info,
)

router = APIRouter(tags=["Pooling"], route_class=JsonRoute)

SOURCES = ("texts", "images", "inputs")
TYPES = ("float", "base64", "int8", "uint8", "binary", "ubinary")
# Models' prompt names for Cohere's input types.
PROMPT_NAMES = {"search_query": QUERY_PROMPTS, "search_document": DOCUMENT_PROMPTS}


@router.post("/v2/embed", response_model=CohereEmbeddings, responses=ERRORS)
async def embed(body: CohereEmbedRequest, request: Request) -> Response:
    """Embed texts, images, or inputs of both."""
    service: Service = request.app.state.service
    await service.check_model(body.model)
    service.check_pools()
    service.check_capacity()
    field, items = _read_items(body)
    kinds = body.embedding_types or ["float"]
    for kind in kinds:
        if kind not in TYPES:
            raise InputError(
                f"embedding_types may contain {', '.join(TYPES)}, got {kind!r:.80}",
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
    request_id = f"embd-{request.state.request_id}"
    truncation = _truncation(body)
    options = InputOptions(truncation, priority=body.priority or 0, field=field)
    # The vector of a conversation is that of its last token, where the answer would begin.
    as_message = replace(
        options, truncation=InputTruncation(), add_special_tokens=info.dual is not None
    )
    prepare_text = prepare_with(service, request_id, params, options)
    prepare_message = prepare_with(service, request_id, params, as_message)

    def prepare(item: str | TurnRequest) -> PreparedInput:
        if isinstance(item, str):
            return prepare_text(item)
        return prepare_message(pooling_prompt(service.frontend, item))

    async def work() -> bytes:
        try:
            requests, deltas = await pool_all(service, prepare, items, params)
        except InputOverflow as error:
            option = "truncate to START or END" if field == "texts" else A_LONGER_CONTEXT
            raise error.of_field(field, option) from None
        texts = body.texts or []
        return await service.in_thread(_write, request_id, texts, kinds, requests, deltas)

    return json_response(await unless_gone(request, work()))


def _read_items(body: CohereEmbedRequest) -> tuple[str, Sequence[str | TurnRequest]]:
    """The field that is given, and its items: texts, or messages of a user."""
    given = [name for name in SOURCES if getattr(body, name) is not None]
    if len(given) > 1:
        raise InputError(f"give one of {', '.join(SOURCES)}, got {' and '.join(given)}", given[1])
    if body.images is not None:
        check_not_empty(body.images, "images")
        return "images", [
            _turn([_image(url, f"images[{index}]")]) for index, url in enumerate(body.images)
        ]
    if body.inputs is not None:
        if not body.inputs:
            raise InputError("inputs must not be empty: give at least one", "inputs")
        return "inputs", [
            _turn(_parts(item, f"inputs[{index}].content"))
            for index, item in enumerate(body.inputs)
        ]
    check_not_empty(body.texts or [], "texts")
    return "texts", body.texts or []


def _turn(parts: list[dict[str, Any]]) -> TurnRequest:
    return TurnRequest([{"role": "user", "content": parts}], SamplingParams())


def _parts(item: CohereInput, where: str) -> list[dict[str, Any]]:
    if not item.content:
        raise InputError(f"{where} must not be empty: leave the input out", "inputs")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(item.content):
        given = part.text if part.type == "text" else part.image_url
        at = f"{where}[{index}].{part.type}"
        if given is None:
            raise InputError(f"{at} is missing", at)
        if isinstance(given, str):
            parts.append({"type": "text", "text": given})
        else:
            parts.append(_image(given.url, f"{at}.url"))
    return parts


def _image(url: str, where: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": MediaReference(url, where)}


def _truncation(body: CohereEmbedRequest) -> InputTruncation:
    if body.truncate == "NONE":
        if body.max_tokens is not None:
            raise InputError("max_tokens needs truncate to be START or END", "max_tokens")
        return InputTruncation()
    if body.max_tokens is not None and body.max_tokens < 1:
        raise InputError(f"max_tokens must be at least 1, got {body.max_tokens}", "max_tokens")
    side: Literal["first", "last"] = "last" if body.truncate == "START" else "first"
    return InputTruncation(-1, side, max_text_tokens=body.max_tokens)


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
    offset = 128 if kind.startswith("u") else 0
    if kind.endswith("int8"):
        # Scaled to its own largest number, which keeps its cosines: no calibration is needed.
        codes = np.rint(vector / (np.abs(vector).max() or 1) * 127)
    else:
        codes = np.packbits(vector > 0).astype(np.int16) - 128
    return (codes.astype(np.int16) + offset).tolist()
