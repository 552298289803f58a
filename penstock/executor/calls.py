"""What the engine's process and a rank's say to each other: calls of `Worker`'s methods."""

from __future__ import annotations

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
