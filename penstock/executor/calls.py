"""Messages between the engine process and a rank's process: calls of `Worker`'s methods."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config import EngineConfig

NOTHING = b""
"""A message without a call, which the rank's kernel acknowledges: see `silence.py`."""


class Hello(msgspec.Struct):
    """The first message to a rank: its rank and its config. Answered with `Capabilities`."""

    config: EngineConfig
    rank: int
    rendezvous: str  # of all ranks: file:// or tcp://
    local_rank: int  # among those of its machine
    local_size: int


class Join(msgspec.Struct):
    """The first message from a rank of another machine.

    Answered with `Welcome` or `Raised`, unless the engine has started the rank itself.
    """

    version: str
    config: dict[str, Any]  # another version may not be able to decode it as `EngineConfig`
    node_rank: int
    local_rank: int
    host: str
    token: str = ""  # of a rank that the engine has started, through Ray


class Welcome(msgspec.Struct, tag=True):
    """`Hello` follows."""


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
JoinAnswer = Welcome | Raised
