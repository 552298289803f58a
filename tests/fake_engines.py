"""Engines that say what a test wants them to say, and a client that drives them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from penstock.config import EngineConfig, ServerConfig
from penstock.engine import messages
from penstock.engine.async_client import AsyncEngineClient
from penstock.engine.dispatch import Dispatch
from penstock.engine.handle import Death
from penstock.engine.ledger import DeltaStream
from penstock.engine.messages import EngineInfo, Outputs
from penstock.engine.replicas import ReplicaSet
from penstock.engine.supervisor import Supervisor
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import EngineDeadError, ModelError
from penstock.protocol.limits import StepLimits
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams

INFO = EngineInfo(
    StepLimits(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64), num_kv_blocks=64
)
decode_request = msgspec.msgpack.Decoder(EngineRequest).decode


class FakeEngine:
    """Keeps what it is sent, as (kind, request id, output tokens), and the seeds of requests."""

    def __init__(self) -> None:
        self.is_ready = True
        self.running: dict[str, int] = {}  # how many tokens each request has
        self.aborted: list[str] = []  # ended, and their client has not been told
        self.seeds: list[int] = []
        self.sent: list[tuple[Any, ...]] = []

    def send(self, kind: bytes, *frames: bytes) -> None:
        if kind == messages.ADD:
            request = decode_request(frames[1])
            assert request.request_id == frames[0].decode()
            assert request.request_id not in self.running, "it is there already"
            self.sent.append(("add", request.request_id, request.output_token_ids))
            self.seeds.append(request.seed)
            self.running[request.request_id] = len(request.output_token_ids)
        elif kind == messages.FINISH:
            for request_id in messages.decode_finish(frames[0]).request_ids:
                self.sent.append(("finish", request_id))
                if self.running.pop(request_id, None) is not None:
                    self.aborted.append(request_id)

    def take(self) -> list[tuple[Any, ...]]:
        sent, self.sent = self.sent, []
        return sent


class FakeSupervisor:
    """Its engine is not loaded yet."""

    def __init__(self, dispatch: FakeDispatch) -> None:
        self.engine = FakeEngine()
        self.engine.is_ready = False
        self.config: EngineConfig | None = None  # that it was loaded with
        self.is_closed = False
        self._dispatch = dispatch
        self.lost: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()

    async def load(self, config: EngineConfig) -> EngineInfo:
        self.config = config
        if config.model.model == "broken":
            raise ModelError("this model is broken")
        self.engine.is_ready = True
        self._dispatch._on_ready(INFO)
        return INFO

    def limit_model_len(self, max_model_len: int) -> None:
        pass

    async def close(self) -> None:
        assert not self.engine.running, "requests are lost"
        self.engine.is_ready, self.is_closed = False, True


class FakeDispatch(Dispatch):
    def _start(self, config: ServerConfig, keep_spare: bool) -> Supervisor:
        return FakeSupervisor(self)  # type: ignore[return-value]


class FakeReplicas(ReplicaSet):
    def start(self, index: int, is_only: bool = False) -> Dispatch:
        return FakeDispatch(self._ledger, self._config, self, index, is_only)


def seed_of(request_id: str) -> int:
    return int.from_bytes(request_id.encode(), "little")


class Bench:
    """A client with fake engines, and what its observers were told."""

    def __init__(
        self, max_request_crashes: int = 2, num_replicas: int = 1, restart_engine: bool = True
    ) -> None:
        self.told: list[str] = []
        config = ServerConfig(
            max_request_crashes=max_request_crashes, restart_engine=restart_engine
        )
        self.client = AsyncEngineClient(config)
        self.client.replicas = self.replicas = FakeReplicas(
            self.client.ledger, config, num_replicas
        )
        self.client._info = INFO
        self.client.observers.append(self)  # type: ignore[arg-type]
        for index in range(num_replicas):
            self.engine_of(index).is_ready = True
            self.dispatch_of(index)._on_ready(INFO)
        self.told.clear()

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("on_"), name
        return lambda *_: self.told.append(name)

    def dispatch_of(self, replica: int) -> Dispatch:
        return self.replicas.members[replica].dispatch

    def engine_of(self, replica: int) -> FakeEngine:
        supervisor: Any = self.dispatch_of(replica)._supervisor
        engine: FakeEngine = supervisor.engine
        return engine

    @property
    def engine(self) -> FakeEngine:
        return self.engine_of(0)

    def submit(self, *request_ids: str, **options: Any) -> DeltaStream:
        params, now = SamplingParams(max_tokens=16), time.monotonic()
        return self.client.submit(
            [
                EngineRequest(
                    request_id=i,
                    prompt_token_ids=[1],
                    params=params,
                    seed=seed_of(i),
                    arrival_time=now,
                )
                for i in request_ids
            ],
            **options,
        )

    def say(self, request_id: str, *token_ids: int, replica: int = 0, **options: Any) -> None:
        delta = EngineDelta(request_id=request_id, token_ids=list(token_ids), **options)
        if delta.finish_reason is not None:
            self.engine_of(replica).running.pop(request_id, None)
        self.dispatch_of(replica)._on_outputs(Outputs([delta]))

    def let_go(self, replica: int) -> None:
        """The engine tells which of its requests it has aborted."""
        engine = self.engine_of(replica)
        aborted, engine.aborted = engine.aborted, []
        deltas = [EngineDelta(request_id=i, finish_reason=FinishReason.ABORT) for i in aborted]
        self.dispatch_of(replica)._on_outputs(Outputs(deltas))

    def die(self, *executing: str, replica: int = 0) -> bool:
        """The engine dies; whether one request explains it."""
        engine = self.engine_of(replica)
        engine.is_ready, engine.running = False, {}
        died = Death("signal 9", None, frozenset(executing), uptime_s=1.0)
        return self.dispatch_of(replica)._on_death(died).is_explained

    def lose(self, replica: int = 0) -> EngineDeadError:
        """The dead engine is not restarted."""
        error = EngineDeadError("for good")
        supervisor: Any = self.dispatch_of(replica)._supervisor
        supervisor.lost.set_result(error)
        self.dispatch_of(replica)._on_loss(error)
        return error

    def revive(self, replica: int = 0) -> list[tuple[Any, ...]]:
        """Another engine is ready; what it is sent."""
        supervisor: Any = self.dispatch_of(replica)._supervisor
        supervisor.engine = FakeEngine()
        self.dispatch_of(replica)._on_ready(INFO)
        return self.engine_of(replica).take()


def on_a_loop(test: Any) -> Any:
    """Run an async test."""

    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run
