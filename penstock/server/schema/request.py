"""RequestBody: the fields of every generating API. Sampling fields are derived, not listed.

A field of `SamplingParams` becomes a field of all APIs, with the same name and help.
"""

from __future__ import annotations

import functools
import operator
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin

import msgspec
from pydantic import Field, create_model

from penstock.config.sampling import sampling_options
from penstock.conversation.request import PromptTruncation, RunOptions
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import OutputKind, SamplingParams
from penstock.server.schema.base import Entries, Items, OpenBody, Seconds, Text

# These depend on an API's reply format. Each API reads them itself.
OF_THE_REPLY = frozenset(
    {
        "n", "max_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids", "detokenize",
        "output_kind", "structured_outputs", "extra_args",
    }
)  # fmt: skip
SAMPLING_FIELDS = {
    field.name: field.type
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in OF_THE_REPLY
}


def _body_type(kind: Any) -> Any:
    """Convert a field's type for bodies: texts must be Unicode, lists stop at the first error."""
    arguments = get_args(kind)
    match get_origin(kind):
        case origin if origin is list:
            return Items[_body_type(arguments[0])]  # type: ignore[misc]
        case origin if origin is dict:  # JSON has no other keys
            return Entries[str, _body_type(arguments[1])]  # type: ignore[misc]
        case origin if origin is UnionType:
            return functools.reduce(operator.or_, map(_body_type, arguments))
    return Text if kind is str else kind


if TYPE_CHECKING:
    SamplingBody = OpenBody
else:
    _HELP = {option.name: option.help for option in sampling_options()}
    SamplingBody = create_model(
        "SamplingBody",
        __base__=OpenBody,
        **{
            name: (_body_type(kind) | None, Field(None, description=_HELP[name]))
            for name, kind in SAMPLING_FIELDS.items()
        },
    )


class RequestBody(SamplingBody):
    """What every API takes that generates."""

    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    priority: int | None = Field(
        None, description="Lower runs first. Requires --scheduling-policy priority."
    )
    cache_salt: Text | None = Field(
        None, description="Share cached prefixes only with requests of the same salt."
    )
    timeout: Seconds | None = Field(
        None, description="Maximum seconds for the request; in responses, for each round."
    )
    vllm_xargs: dict[str, Any] | None = Field(
        None, description="Arguments for custom logits processors, as extra_args in Python."
    )

    def sampling_params(self, defaults: SamplingParams, **own: Any) -> SamplingParams:
        """Return `defaults` with the request's fields. `own` are those the API reads itself.

        Raises `InputError` for a value that makes no sense, or a field of vLLM that is not
        supported.
        """
        self.refuse_foreign()
        sent = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        sent = {name: value for name, value in sent.items() if value is not None}
        if "logit_bias" in sent:
            sent["logit_bias"] = _by_token_id(sent["logit_bias"])
        if self.vllm_xargs is not None:
            sent["extra_args"] = self.vllm_xargs
        kind = OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY
        options = {**msgspec.structs.asdict(defaults), "output_kind": kind, **sent, **own}
        return SamplingParams(**options)

    def run_options(
        self, add_special_tokens: bool = False, truncation: PromptTruncation | None = None
    ) -> RunOptions:
        if self.timeout is not None and not self.timeout > 0:
            raise InputError(f"timeout must be above 0 seconds, got {self.timeout}", "timeout")
        return RunOptions(
            add_special_tokens=add_special_tokens,
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            truncation=truncation,
            timeout_s=self.timeout,
        )


def _by_token_id(biases: dict[str, float]) -> dict[int, float]:
    converted = {}
    for key, bias in biases.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InputError(f"logit_bias must have token ids as keys, got {key!r}", "logit_bias")
        converted[int(key)] = bias
    return converted
