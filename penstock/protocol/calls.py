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


def run_method(target: object, name: str, args: Sequence[bytes | msgspec.Raw]) -> Any:
    """Call a public method with encoded arguments."""
    assert not name.startswith("_"), f"{name} is not for others"
    method = getattr(target, name)
    decoders = _argument_decoders(method.__func__)
    return method(*(decode(arg) for decode, arg in zip(decoders, args, strict=True)))


def decode_result(method: Method, value: bytes | msgspec.Raw) -> Any:
    return _result_decoder(method)(value)


@functools.cache
def _argument_decoders(method: Method) -> list[Method]:
    hints = get_type_hints(method)
    del hints["return"]
    return [msgspec.msgpack.Decoder(hint).decode for hint in hints.values()]


@functools.cache
def _result_decoder(method: Method) -> Method:
    return msgspec.msgpack.Decoder(get_type_hints(method)["return"]).decode
