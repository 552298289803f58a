"""Methods called in another process: arguments and results are typed by the method's annotations.

So a new method needs no message of its own. All of it is msgpack: nothing is unpickled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import msgspec

Method = Callable[..., Any]

encode = msgspec.msgpack.Encoder().encode


def encode_args(args: Sequence[Any]) -> list[bytes]:
    return [encode(arg) for arg in args]


def run_method(target: object, name: str, args: Sequence[bytes | msgspec.Raw]) -> bytes:
    """Call a public method with encoded arguments; its encoded result."""
    assert not name.startswith("_"), f"{name} is not for others"
    method = getattr(target, name)
    decoders, _ = _decoders(method.__func__)
    return encode(method(*(decode(arg) for decode, arg in zip(decoders, args, strict=True))))


def decode_result(method: Method, value: bytes | msgspec.Raw) -> Any:
    return _decoders(method)[1](value)


@functools.cache
def _decoders(method: Method) -> tuple[list[Method], Method]:
    """Of a method's arguments, and of its result."""
    hints = get_type_hints(method)
    result = msgspec.msgpack.Decoder(hints.pop("return")).decode
    return [msgspec.msgpack.Decoder(hint).decode for hint in hints.values()], result
