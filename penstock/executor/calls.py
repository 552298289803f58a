"""What the engine's process and a rank's say to each other: calls of `Worker`'s methods.

A method's annotations are the message's types, so a new one needs nothing here. All of it is
msgpack: nothing is unpickled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from penstock.config import EngineConfig


class Hello(msgspec.Struct):
    """The first message to a rank: its place and what to load. Answered with `Capabilities`."""

    config: EngineConfig
    rank: int
    size: int
    store_path: str


class Call(msgspec.Struct, array_like=True):
    method: str
    args: list[msgspec.Raw]
    is_answered: bool = True


class Returned(msgspec.Struct, tag=True):
    value: msgspec.Raw


class Raised(msgspec.Struct, tag=True):
    """The call ended with an error, and with it the rank."""

    error: str
    kind: str  # the name of the error's class


CallAnswer = Returned | Raised

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    return _encoder.encode(message)


def make_call(method: str, args: tuple[Any, ...], is_answered: bool) -> bytes:
    return encode(Call(method, [msgspec.Raw(encode(arg)) for arg in args], is_answered))


def run_call(target: object, call: Call) -> Any:
    """Call the method with the arguments that its annotations say."""
    method = getattr(target, call.method)
    decoders, _ = _decoders(method.__func__)
    return method(*(decode(arg) for decode, arg in zip(decoders, call.args, strict=True)))


def decode_result(method: Callable[..., Any], value: msgspec.Raw) -> Any:
    return _decoders(method)[1](value)


@functools.cache
def _decoders(method: Callable[..., Any]) -> tuple[list[Callable[..., Any]], Callable[..., Any]]:
    """Of a method's arguments, and of its result."""
    hints = get_type_hints(method)
    result = msgspec.msgpack.Decoder(hints.pop("return")).decode
    return [msgspec.msgpack.Decoder(hint).decode for hint in hints.values()], result
