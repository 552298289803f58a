"""Messages between the API process and the engine process. Nothing here imports torch.

A message to the engine has separate frames for its kind, the request's id and the body. So a body
that cannot be decoded fails only its own request. Messages from the engine are tagged structs.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from penstock.config import EngineConfig
from penstock.protocol.delta import EngineDelta
from penstock.protocol.errors import InputError, RequestFault
from penstock.protocol.limits import StepLimits
from penstock.protocol.pooling import PoolingInfo
from penstock.protocol.prefix import CacheUpdate, PrefixKeys
from penstock.scheduler.stats import AdapterStats, SchedulerStats, SpeculationStats

# Kinds of messages to the engine: the first frame.
LOAD = b"load"  # an EngineConfig
ADD = b"add"  # a request id, an EngineRequest
FINISH = b"finish"  # a Finish
CALL = b"call"  # a number, a method of `EngineCore`, its arguments
CLOSE = b"close"


class Finish(msgspec.Struct, frozen=True):
    """End these requests now: their clients left, or they hit a stop string."""

    request_ids: list[str]


class EngineInfo(msgspec.Struct, frozen=True):
    """Properties of the engine. Known once its model is loaded."""

    limits: StepLimits
    num_kv_blocks: int
    pooling: PoolingInfo | None = None  # for pooling models
    prefix_keys: PrefixKeys | None = None  # None: no prefix is cached


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine's state. Counters run since its start."""

    scheduler: SchedulerStats
    num_steps: int = 0
    step_tokens: list[int] = []  # computed by each step since the last stats
    metrics: dict[str, int] = {}  # counted by the workers since the last stats
    adapters: AdapterStats | None = None  # None without LoRA
    speculation: SpeculationStats | None = None  # None without a drafter


class Connected(msgspec.Struct, tag=True):
    """The engine process is connected. The socket's file is not needed any more."""


class Ready(msgspec.Struct, tag=True):
    info: EngineInfo


class EngineFailed(msgspec.Struct, tag=True):
    """The engine could not start or cannot continue. Its last message."""

    error: str
    kind: str  # the name of the error's class


class CallResult(msgspec.Struct, array_like=True):
    """The result of a call: a value or an error."""

    call_id: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil: an empty one would encode to nothing
    error: str | None = None
    is_input_error: bool = False  # the caller's: an argument was wrong
    field: str | None = None  # with an input error

    @classmethod
    def of_error(cls, call_id: int, error: Exception) -> CallResult:
        if isinstance(error, InputError):
            return cls(call_id, error=str(error), is_input_error=True, field=error.field)
        return cls(call_id, error=str(error))

    def settle(self, answer: asyncio.Future[Any]) -> None:
        if self.error is not None and self.is_input_error:
            answer.set_exception(InputError(self.error, self.field))
        elif self.error is not None:
            answer.set_exception(RequestFault(self.error))
        else:
            answer.set_result(msgspec.msgpack.decode(self.value))


class Outputs(msgspec.Struct, tag=True, omit_defaults=True):
    """The outputs of a step. Stats are added a few times a second and when work runs out."""

    deltas: list[EngineDelta] = []
    calls: list[CallResult] = []
    stats: EngineStats | None = None
    cache: CacheUpdate | None = None  # after `EngineCore.report_cache`


EngineMessage = Connected | Ready | EngineFailed | Outputs

encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(EngineMessage).decode
decode_config = msgspec.msgpack.Decoder(EngineConfig).decode
decode_finish = msgspec.msgpack.Decoder(Finish).decode
