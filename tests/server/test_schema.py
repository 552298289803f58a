"""The server against its own OpenAPI document, with requests that schemathesis makes up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from server_process import ServerProcess

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/batch"),
    ("POST", "/v1/completions"),
    ("POST", "/invocations"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/conversations"),
    ("GET", "/v1/conversations/{conversation_id}"),
    ("POST", "/v1/conversations/{conversation_id}"),
    ("DELETE", "/v1/conversations/{conversation_id}"),
    ("POST", "/v1/conversations/{conversation_id}/items"),
    ("GET", "/v1/conversations/{conversation_id}/items"),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("POST", "/tokenize"),
    ("GET", "/tokenizer_info"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/replicas"),
    ("POST", "/replicas"),
    ("POST", "/replicas/{replica}/drain"),
    ("POST", "/replicas/{replica}/restart"),
    ("POST", "/replicas/{replica}/remove"),
    ("POST", "/replicas/rolling_restart"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/metrics"),
]
POOLING = [
    ("POST", "/v1/embeddings"),
    ("POST", "/pooling"),
    ("POST", "/classify"),
    ("POST", "/score"),
    ("POST", "/v1/score"),
    ("POST", "/rerank"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/v2/embed"),
]
# A field may have a valid type and still make no sense, which is a 400. A text that spells a
# number is taken for one, which no schema says.
EXCLUDED = [
    schemathesis.checks.positive_data_acceptance,
    schemathesis.checks.negative_data_rejection,
]

EXAMPLES = [6, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
LENGTH = ("--max-model-len", "64")
PATIENCE_S = 240  # schemathesis has 10, which a busy machine may need


class Subject:
    """A server and what it promises."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        url = f"{server.base_url}/openapi.json"
        self.schema: Any = schemathesis.openapi.from_url(url, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def generating(serve_module: Callable[..., ServerProcess]) -> Subject:
    adapters = ("--enable-lora", "--allow-runtime-lora-updating")
    return Subject(serve_module(*LENGTH, "--max-n", "4", *adapters))


@pytest.fixture(scope="module")
def pooling(serve_module: Callable[..., ServerProcess]) -> Subject:
    return Subject(serve_module(*LENGTH, "--runner", "pooling"))


@pytest.mark.parametrize("num_examples", EXAMPLES)
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), [*OPERATIONS, *POOLING], ids=lambda value: value)
def test_no_request_breaks_the_promises_of_the_schema(
    method: str, path: str, mode: GenerationMode, num_examples: int, request: pytest.FixtureRequest
) -> None:
    kind = "pooling" if (method, path) in POOLING else "generating"
    subject: Subject = request.getfixturevalue(kind)
    operation = subject.schema[path][method]
    has_input = operation.body or operation.path_parameters
    if not operation.body and mode is GenerationMode.NEGATIVE:
        return  # nothing to get wrong: any text may be a name

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_examples if has_input else 1,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        case.call_and_validate(excluded_checks=EXCLUDED, timeout=PATIENCE_S)

    check()
    assert not subject.server.has_logged("Traceback"), "".join(subject.server.log)


def test_every_operation_is_tried(generating: Subject) -> None:
    paths = generating.server.get("/openapi.json").json()["paths"]
    documented = {(method.upper(), path) for path, item in paths.items() for method in item}
    assert documented == {*OPERATIONS, *POOLING}
