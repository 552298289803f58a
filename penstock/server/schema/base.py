"""Base classes and field types of bodies and replies."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from penstock.protocol.vllm_fields import leave_out_foreign_fields

TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
T = TypeVar("T")
# Stops at the first invalid item: formatting millions of errors would take minutes.
Items = Annotated[list[T], Field(fail_fast=True)]


def _check_one_by_one(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, dict):
        for key, entry in value.items():
            check({key: entry})
    return check(value)


K = TypeVar("K")
# The same for objects. pydantic before 2.14 has no fail_fast for these.
Entries = Annotated[dict[K, T], WrapValidator(_check_one_by_one)]


class Body(BaseModel):
    """A request. As in vLLM, a text that spells a number or a boolean is taken for it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class OpenBody(Body):
    """A request that keeps the fields it does not have, to find vLLM's among them."""

    model_config = ConfigDict(extra="allow")

    def refuse_foreign(self) -> None:
        """Raise `InputError` for a field of vLLM that would change the output."""
        leave_out_foreign_fields(self.model_extra or {}, type(self).__name__)


class Reply(BaseModel):
    model_config = ConfigDict(protected_namespaces=())
    shows_nulls: ClassVar[bool] = False  # whether fields without a value are sent as null


class NullsReply(Reply):
    """A reply of OpenAI's API, in which vLLM's clients find null where there is nothing."""

    shows_nulls = True


def type_of(value: Any) -> Any:
    """Return an object's `type`, validated or not, to select a member of a union.

    Tags of a union that are not identifiers are left out of the path in an error.
    """
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def chosen_by(kind_of: Callable[[Any], Hashable], message: str) -> Discriminator:
    """Select a member of a union by the tag that `kind_of` returns. `message` is the error."""
    return Discriminator(kind_of, custom_error_type="kind", custom_error_message=message)


def _check_unicode(text: str) -> str:
    """Refuse lone surrogates, which JSON allows and nothing else can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "unicode", "must be valid Unicode, without lone surrogates"
        ) from None
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
