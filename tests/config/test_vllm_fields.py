"""Fields of vLLM's requests: each is one here too, or we say what to do about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from penstock import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
from penstock.config.docs import render_vllm_fields
from penstock.config.vllm_routes import ROUTES
from penstock.protocol.errors import InputError
from penstock.protocol.vllm_fields import NOT_NEEDED, NOT_SUPPORTED, leave_out_foreign_fields
from penstock.server.adapters.routes import LoadAdapterRequest, UnloadAdapterRequest
from penstock.server.anthropic.protocol import MessagesRequest
from penstock.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from penstock.server.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from penstock.server.responses.protocol import ResponseRequest

BEAMS = {"beam_width": 2, "max_tokens": 3}
SAY = [{"role": "user", "content": "a"}]
OURS: dict[str, type] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessagesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/pooling": PoolingRequest,
    "/classify": ClassifyRequest,
    "/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
    "SamplingParams": SamplingParams,
    "BeamSearchParams": BeamSearchParams,
    "StructuredOutputsParams": StructuredOutputsParams,
    "PoolingParams": PoolingParams,
}


def listed() -> list[tuple[str, str]]:
    """Each field with what it belongs to."""
    found, owner = [], ""
    for line in (Path(__file__).parent / "vllm_request_fields.txt").read_text().splitlines():
        if line.startswith("["):
            owner = line.strip("[]")
        elif not line.startswith("#"):
            found += [(owner, name) for name in line.split()]
    return found


def fields_of(kind: type) -> set[str]:
    if issubclass(kind, BaseModel):
        fields = kind.model_fields.items()
        return {name for key, field in fields for name in (key, field.alias) if name}
    if issubclass(kind, msgspec.Struct):
        return set(kind.__struct_fields__)
    return {field.name for field in dataclasses.fields(kind)}


def test_every_field_of_vllm_is_ours_or_in_the_table() -> None:
    known = {owner: fields_of(kind) for owner, kind in OURS.items()}
    listing = [(owner, name) for owner, name in listed() if owner not in ROUTES]
    assert {owner for owner, _ in listing} == known.keys()
    foreign = NOT_NEEDED.keys() | NOT_SUPPORTED.keys()
    missing = [f"{owner} {name}" for owner, name in listing if name not in known[owner] | foreign]
    assert not missing


def test_the_tables_name_a_field_once() -> None:
    assert not NOT_NEEDED.keys() & NOT_SUPPORTED.keys()


def test_the_migration_page_shows_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "moving-from-vllm.md"
    table = render_vllm_fields()
    assert table in page.read_text(), "run: python -m penstock.config.docs vllm-fields"


@pytest.mark.parametrize(
    "fields",
    [
        {"flat_logprobs": False, "stream_interval": 5},
        {"guided_decoding": None, "best_of": 1, "length_penalty": 1.0},
        {"skip_reading_prefix_cache": False, "routed_experts_prompt_start": 0},
    ],
)
def test_keywords_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert SamplingParams(**fields, max_tokens=7) == SamplingParams(max_tokens=7)


@pytest.mark.parametrize(
    ("kind", "fields", "remedy"),
    [
        (SamplingParams, {"guided_decoding": 5}, "use structured_outputs=StructuredOutputsParams"),
        (SamplingParams, {"best_of": 2}, "best_of is not supported here: use n"),
        (PoolingParams, {"returned_token_ids": [1]}, "set pooler_config"),
        (BeamSearchParams, {**BEAMS, "guided_regex": "", "best_of": 4}, "here: use beam_width"),
        (BeamSearchParams, {**BEAMS, "guided_json": {}, "best_of": 4}, "guided_json is not"),
        (BeamSearchParams, {**BEAMS, "structured_outputs": {"regex": "a"}}, "follows no grammar"),
        (BeamSearchParams, {**BEAMS, "guided_decoding": {"regex": "a"}}, "follows no grammar"),
    ],
)
def test_keywords_that_are_not_supported_name_the_remedy(
    kind: type, fields: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(InputError, match=remedy):
        kind(**fields)


def test_a_keyword_that_nobody_knows_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1, flat_logprobs=False)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ResponseRequest, {"input": "a"}),
        (MessagesRequest, {"messages": SAY, "model": "m", "max_tokens": 3}),
        (CompletionRequest, {"prompt": "a"}),
        (ChatCompletionRequest, {"messages": SAY}),
        (EmbeddingRequest, {"input": "a"}),
        (RerankRequest, {"query": "a", "documents": ["b"]}),
    ],
)
def test_requests_refuse_what_would_change_the_output(kind: Any, body: dict[str, Any]) -> None:
    refused = kind(**body, kv_transfer_params={"remote": 1})
    with pytest.raises(InputError, match="kv_transfer_params is not supported here: prefill and"):
        refused.refuse_foreign()
    kind(**body, user="me", unheard_of=3, repetition_detection=None).refuse_foreign()


def test_arguments_for_logits_processors_may_have_vllms_name() -> None:
    body = CompletionRequest(prompt="a", vllm_xargs={"target": 5})
    assert body.sampling_params(SamplingParams()).extra_args == {"target": 5}


def test_a_value_that_asks_for_nothing_is_left_out() -> None:
    given = {"endianness": "little", "user": "a", "other": 1}
    assert leave_out_foreign_fields(given, "EmbeddingRequest") == {"other": 1}
