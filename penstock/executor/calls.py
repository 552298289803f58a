"""Messages between the engine process and a rank's process: calls of `Worker`'s methods."""

from __future__ import annotations

import msgspec

from penstock.config import EngineConfig


class Hello(msgspec.Struct):
    """The first message to a rank: its rank and its config. Answered with `Capabilities`."""

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
    """The call raised an error. The rank exits after it."""

    error: str
    kind: str  # the name of the error's class


CallAnswer = Returned | Raised
