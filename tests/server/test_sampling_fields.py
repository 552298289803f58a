"""Sampling fields are declared once, in `SamplingParams`: every API takes what stands there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from penstock.config.sampling import sampling_options
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import OutputKind, SamplingParams
from penstock.server.anthropic.protocol import MessagesRequest
from penstock.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from penstock.server.responses.protocol import ResponseRequest
from penstock.server.schema.request import OF_THE_REPLY, RequestBody

SAY = [{"role": "user", "content": "hi"}]
APIS: list[tuple[type[RequestBody], dict[str, Any]]] = [
    (ChatCompletionRequest, {"messages": SAY}),
    (CompletionRequest, {"prompt": "hi"}),
    (ResponseRequest, {"input": "hi"}),
    (MessagesRequest, {"messages": SAY, "model": "m", "max_tokens": 4}),
]
# As clients may send them: numbers and booleans also as texts.
SENT: dict[str, Any] = {
    "presence_penalty": "0.5",
    "frequency_penalty": -0.5,
    "repetition_penalty": "1.1",
    "temperature": "0",
    "top_p": "0.9",
    "top_k": "7",
    "min_p": 0.1,
    "seed": "3",
    "stop": ["x", "y"],
    "stop_token_ids": ["5"],
    "ignore_eos": "true",
    "min_tokens": "2",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": "true",
    "logit_bias": {"7": "1.5"},
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "thinking_token_budget": "9",
    "speculative": False,
}
WANTED: dict[str, Any] = {
    **SENT,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 7,
    "seed": 3,
    "stop_token_ids": [5],
    "ignore_eos": True,
    "min_tokens": 2,
    "include_stop_str_in_output": True,
    "logit_bias": {7: 1.5},
    "thinking_token_budget": 9,
}
by_api = pytest.mark.parametrize(("kind", "body"), APIS, ids=[kind.__name__ for kind, _ in APIS])


def test_every_sampling_field_is_sent_here_or_belongs_to_the_reply() -> None:
    assert set(SENT) | OF_THE_REPLY == set(SamplingParams.__struct_fields__)
    assert not set(SENT) & OF_THE_REPLY


@by_api
def test_every_api_takes_every_sampling_field(
    kind: type[RequestBody], body: dict[str, Any]
) -> None:
    params = kind(**body, **SENT).sampling_params(SamplingParams())
    made = msgspec.structs.asdict(params)
    assert {name: made[name] for name in WANTED} == WANTED


@by_api
def test_every_api_describes_a_field_as_it_is_declared(
    kind: type[RequestBody], body: dict[str, Any]
) -> None:
    described = kind.model_json_schema()["properties"]
    helps = {option.name: option.help for option in sampling_options()}
    assert {name: described[name]["description"] for name in SENT} == {
        name: helps[name] for name in SENT
    }


@by_api
def test_a_field_that_is_null_or_left_out_has_the_models_default(
    kind: type[RequestBody], body: dict[str, Any]
) -> None:
    defaults = SamplingParams(temperature=0.3, top_k=5, stop=["end"])
    params = kind(**body, temperature=None).sampling_params(defaults)
    assert (params.temperature, params.top_k, params.stop) == (0.3, 5, ["end"])
    assert params.output_kind == OutputKind.FINAL_ONLY
    assert kind(**body, stream=True).sampling_params(defaults).output_kind == OutputKind.DELTA


@by_api
@pytest.mark.parametrize(
    "wrong",
    [{"temperature": "warm"}, {"stop": 3}, {"bad_words": ["\ud800"]}, {"stop_token_ids": ["a"]}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_value_of_a_wrong_type_is_refused_under_the_fields_name(
    kind: type[RequestBody], body: dict[str, Any], wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind(**body, **wrong)
    assert caught.value.errors()[0]["loc"][0] == next(iter(wrong))


@by_api
def test_a_bias_must_name_a_token(kind: type[RequestBody], body: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="logit_bias must have token ids as keys, got '-1'"):
        kind(**body, logit_bias={"-1": 1}).sampling_params(SamplingParams())
