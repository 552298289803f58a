"""ReplicaSet: decides on which replica each of the ledger's requests runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig, ServerConfig
from penstock.config.engine import RoutingPolicy
from penstock.engine.dispatch import Dispatch
from penstock.engine.ledger import Ledger
from penstock.engine.messages import EngineInfo
from penstock.engine.observer import RequestRecord
from penstock.engine.replica import Replica
from penstock.engine.routing import ReplicaRouter
from penstock.platforms.cores import threads_of_replica
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import EngineDeadError, waited_too_long
from penstock.protocol.prefix import CacheUpdate

logger = logging.getLogger(__name__)

LOOKS_PER_WAIT = 8  # checks per queue timeout for requests that wait here
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # one exists if CUDA can have a GPU


class ReplicaSet:
    """One ledger's requests on several replicas.

    A request waits here only while no replica takes requests. If a replica dies, those of its
    requests that cannot have killed it go on at once on the others. The others run alone on the
    restarted replica first, never beside requests that are served. A request that has tokens goes
    on only with the version of the model that they come from.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: ServerConfig,
        num_replicas: int = 1,
        policy: RoutingPolicy = "prefix",
    ) -> None:
        """Start the processes. They import their modules in the background."""
        self.lost: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self.members: dict[int, Replica] = {}
        self.config: EngineConfig | None = None  # what all engines were loaded with
        self._ledger = ledger
        self._config = config
        self._policy = policy
        self._router = ReplicaRouter(policy)
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, None] = {}  # requests on no replica
        self._queue_timeout_s: float | None = None
        self._waits_timer: asyncio.TimerHandle | None = None
        for index in range(num_replicas):
            self.members[index] = Replica(self.start(index, is_only=num_replicas == 1))

    def start(self, index: int, is_only: bool = False) -> Dispatch:
        """Start the process of a replica, which is no member yet."""
        return Dispatch(self._ledger, self._config, self, index, is_only)

    # -- the engines

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Load the model in all engines. Raises the error of the first that fails."""
        self._queue_timeout_s = config.scheduler.queue_timeout_s
        dispatches = [replica.dispatch for replica in self.members.values()]
        infos = await asyncio.gather(
            *(dispatch.load(replica_config(config, dispatch.index)) for dispatch in dispatches)
        )
        # What one replica takes, all must take.
        smallest = min(infos, key=lambda info: info.limits.max_model_len)
        for dispatch in dispatches:
            dispatch.limit_model_len(smallest.limits.max_model_len)
        model = dataclasses.replace(config.model, max_model_len=smallest.limits.max_model_len)
        self.config = dataclasses.replace(config, model=model)
        return smallest

    def enter(self, replica: Replica) -> None:
        """Add a replica, or put it in the place of another. Its engine is yet to be loaded."""
        self.members[replica.index] = replica
        if len(self.members) == 2:  # nobody had to know what the first has cached
            for index in self.infos:
                self._follow(index)

    def leave(self, index: int) -> None:
        """Remove a replica that has no requests."""
        self.on_death(index)
        del self.members[index]
        for observer in self._ledger.observers:
            observer.on_gone(index)

    @property
    def takes_requests(self) -> bool:
        """Whether any replica takes new requests."""
        return any(item.takes_requests for item in self.members.values())

    @property
    def has_living(self) -> bool:
        """Whether any replica is not lost."""
        return bool(self._living())

    def has_work_for(self, replica: Replica) -> bool:
        """Whether a replica has requests, or some that only it can run wait for it."""
        if replica.num_requests or not replica.ends_version:
            return bool(replica.num_requests)
        waiting = [self._ledger.records[request_id] for request_id in self._waiting]
        versions = {item.version for item in self.members.values() if item is not replica}
        return any(
            item.token_ids and item.version == replica.version and item.version not in versions
            for item in waiting
        )

    def movable(self, request_ids: Iterable[str], version: int) -> list[str]:
        """Those that can leave their replica, whose successor has this version."""
        versions = {version}
        versions |= {item.version for item in self.members.values() if item.takes_requests}
        records = [self._ledger.records[request_id] for request_id in request_ids]
        return [
            item.request_id for item in records if not item.token_ids or item.version in versions
        ]

    def _living(self) -> dict[int, Replica]:
        return {index: item for index, item in self.members.items() if not item.dispatch.is_lost}

    async def close(self) -> None:
        """Stop the processes."""
        self._is_closing = True
        if self._waits_timer is not None:
            self._waits_timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(replica.dispatch.close() for replica in self.members.values()))

    def kill(self) -> None:
        """Kill the processes without a clean shutdown."""
        self._is_closing = True
        for replica in self.members.values():
            replica.dispatch.kill()

    @property
    def is_healthy(self) -> bool:
        """Whether an engine is running."""
        return any(replica.dispatch.is_healthy for replica in self.members.values())

    @property
    def is_lost(self) -> bool:
        """Whether all replicas are gone for good."""
        return self._is_closing or self.lost.done()

    @property
    def running(self) -> list[int]:
        """The replicas that have an engine now."""
        return [index for index, item in self.members.items() if item.dispatch.is_healthy]

    @property
    def infos(self) -> dict[int, EngineInfo]:
        """The engines' properties, of replicas that have had one and are not lost."""
        dispatches = [item.dispatch for item in self.members.values()]
        return {
            item.index: item.info
            for item in dispatches
            if item.info is not None and not item.is_lost
        }

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of requests that run at once, on all replicas together."""
        return sum(info.limits.max_num_seqs for info in self.infos.values())

    async def call(self, method: str, args: Sequence[Any], replica: int | None) -> Any:
        """Run a method of `EngineCore` on one replica, or on all that are running.

        Returns the first result. Raises an error of the method if it failed anywhere. An engine
        that dies meanwhile does not count unless all do.
        """
        if replica is not None:
            return await self.members[replica].dispatch.call(method, *args)
        dispatches = [item.dispatch for item in self.members.values()]
        if len(dispatches) == 1:
            return await dispatches[0].call(method, *args)
        results = await asyncio.gather(
            *(dispatch.call(method, *args) for dispatch in dispatches if dispatch.is_healthy),
            return_exceptions=True,
        )
        results = [item for item in results if not isinstance(item, EngineDeadError)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if not results:
            raise EngineDeadError("no engine is running; try again later")
        return results[0]

    # -- placing requests

    def add(
        self, request_ids: Sequence[str], rank: int | None = None, session: str | None = None
    ) -> None:
        """Run requests from the ledger, on replica `rank` if it takes requests now."""
        for request_id in request_ids:
            record = self._ledger.records[request_id]
            record.session = session
            self._place(record, rank)

    def recall(self, records: Sequence[RequestRecord]) -> None:
        """Make the engines end these requests, which have been retired from the ledger."""
        by_replica: dict[int, list[str]] = {}
        for record in records:
            if record.replica is not None:
                by_replica.setdefault(record.replica, []).append(record.request_id)
        for index, request_ids in by_replica.items():
            self.members[index].dispatch.recall(request_ids)

    def forget(self, record: RequestRecord) -> None:
        """Forget a request that has ended."""
        if record.replica is None:
            self._waiting.pop(record.request_id, None)
        else:
            self.members[record.replica].dispatch.forget(record.request_id)
        self._router.finished(record.request_id)

    def _place(self, record: RequestRecord, rank: int | None = None) -> None:
        """Send a request to a replica. If none takes requests, it waits."""
        record.replica = self._choose(record, rank)
        if record.replica is None:
            self._waiting[record.request_id] = None
            self._watch_waits()
            return
        replica = self.members[record.replica]
        record.version = replica.version
        replica.dispatch.add(record.request_id)

    def _allowed(self, record: RequestRecord) -> list[int]:
        """The replicas that may run a request now."""
        if not record.token_ids:
            return [index for index, item in self.members.items() if item.takes_requests]
        same = [item for item in self.members.values() if item.version == record.version]
        allowed = [item.index for item in same if item.takes_requests]
        # The last replica with a version runs its requests to their end.
        return allowed or [i.index for i in same if i.ends_version and i.dispatch.is_open]

    def _choose(self, record: RequestRecord, rank: int | None) -> int | None:
        allowed = self._allowed(record)
        if not allowed:
            return None
        if rank in allowed:
            allowed = [rank]
        request = self._ledger.replay(record.request_id) if record.token_ids else record.request
        return self._router.choose(request, record.session, allowed)

    # -- what a dispatch reports

    def release(self, replica: int, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._place(self._ledger.records[request_id])
        if self.members[replica].dispatch.suspects:
            self._watch_waits()

    def on_ready(self, replica: int, info: EngineInfo) -> None:
        self._router.add(replica, info)
        if len(self.members) > 1:
            self._follow(replica)

    def _follow(self, replica: int) -> None:
        """Keep the router informed of what a replica has cached, if it uses that."""
        if self._policy == "prefix":
            task = asyncio.ensure_future(self._follow_cache(self.members[replica].dispatch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _follow_cache(self, dispatch: Dispatch) -> None:
        """Have an engine report what its prefix cache holds."""
        with contextlib.suppress(EngineDeadError):  # its successor is asked in turn
            await dispatch.call("report_cache")

    def on_cache(self, replica: int, update: CacheUpdate) -> None:
        self._router.published(replica, update)

    def on_start(self, request_id: str) -> None:
        self._router.started(request_id)

    def on_death(self, replica: int) -> None:
        self._router.remove(replica)

    def on_open(self, replica: int) -> None:
        self.place_waiting()

    def place_waiting(self) -> None:
        """Look again for replicas for the requests that wait."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for record in [item for key, item in self._ledger.records.items() if key in waiting]:
            self._place(record)

    def on_lost(self, replica: int, suspects: Sequence[str], error: EngineDeadError) -> None:
        for observer in self._ledger.observers:
            observer.on_gone(replica)
        if not (left := self._living()):
            self.lose(error)
            return
        logger.error("Engine %d is taken out; %d others go on", replica, len(left))
        self._try_elsewhere([self._ledger.records[request_id] for request_id in suspects], error)
        if all(item.is_draining for item in left.values()):
            self._stop_draining(left.values())
        versions = {item.version for item in left.values()}
        for record in [self._ledger.records[request_id] for request_id in self._waiting]:
            if record.token_ids and record.version not in versions:
                self._ledger.fail(record, error)

    def _stop_draining(self, replicas: Iterable[Replica]) -> None:
        """No other replica is left: these take requests again."""
        for replica in replicas:
            replica.is_draining = replica.ends_version = False
        self.place_waiting()

    def lose(self, error: EngineDeadError) -> None:
        """All replicas are gone for good."""
        self._ledger.fail_all(error)
        if not self.lost.done():
            self.lost.set_result(error)

    def _try_elsewhere(self, suspects: Iterable[RequestRecord], error: EngineDeadError) -> None:
        """Find other replicas on which suspects can run alone. Fail those for which there is none.

        It is one that is not serving. Otherwise it is the one with the least to do, whose requests
        move to the others, if there are others.
        """
        accused: dict[int, list[str]] = {}
        for record in suspects:
            left = list(self._living().values())
            fit = [i for i in left if not record.token_ids or i.version == record.version]
            idle = [item for item in fit if not item.takes_requests]
            if not fit or (not idle and len(left) == 1):
                self._ledger.fail(record, error)
                continue
            chosen = min(idle or fit, key=lambda item: item.num_requests)
            record.replica, record.version = chosen.index, chosen.version
            accused.setdefault(chosen.index, []).append(record.request_id)
        for index, request_ids in accused.items():
            self.members[index].dispatch.accuse(request_ids)
            self._watch_waits()

    # -- waiting

    @property
    def _not_running(self) -> list[RequestRecord]:
        """Requests on no engine: those that wait for a replica, and suspects for their turn."""
        suspects = [i for item in self.members.values() for i in item.dispatch.waiting]
        return [self._ledger.records[request_id] for request_id in (*self._waiting, *suspects)]

    def _watch_waits(self) -> None:
        """Start the queue timeout for requests on no engine. Engines check their own."""
        if self._queue_timeout_s is not None and self._waits_timer is None:
            self._waits_timer = asyncio.get_running_loop().call_later(
                self._queue_timeout_s / LOOKS_PER_WAIT, self._end_long_waits
            )

    def _end_long_waits(self) -> None:
        assert self._queue_timeout_s is not None
        self._waits_timer = None
        latest = time.monotonic() - self._queue_timeout_s
        waiting = self._not_running
        late = [item for item in waiting if item.is_new and item.request.arrival_time < latest]
        for record in late:
            delta = EngineDelta(
                request_id=record.request_id,
                finish_reason=FinishReason.ERROR,
                error=waited_too_long(self._queue_timeout_s),
                can_retry=True,
            )
            self._ledger.take(record, delta, time.monotonic())
        self.recall(late)
        if len(waiting) > len(late):
            self._watch_waits()


def check_cores(config: EngineConfig) -> None:
    """Raise `ConfigError` for more replicas than cores, before any is started.

    Engines check the number of GPUs: this process does not load the libraries for that. Where there
    can be none, each engine would find that out only after it has loaded them.
    """
    parallel, device = config.parallel, config.device
    if parallel.distributed_executor_backend == "ray":
        return  # Ray places the ranks
    may_use_gpu = device.device == "auto" and any(path.exists() for path in GPU_DEVICES)
    if device.device == "cuda" or may_use_gpu:
        return
    if device.cpu_threads is None and not parallel.replica_devices:
        threads_of_replica(parallel.num_engines, parallel.num_ranks)


def replica_config(config: EngineConfig, index: int) -> EngineConfig:
    """The configuration of one replica's engine, with the devices or cores that it uses."""
    parallel = config.parallel
    num_replicas = max(parallel.num_engines, index + 1)  # more may be added
    if num_replicas == 1 and not parallel.replica_devices:
        return config
    device = dataclasses.replace(
        config.device,
        device_ids=parallel.devices_of(index),
        first_gpu=index * parallel.num_ranks,
        num_replicas=num_replicas,
    )
    # KV events carry the rank, and their ports are offset by it.
    rank = parallel.data_parallel_rank + index
    parallel = dataclasses.replace(parallel, data_parallel_rank=rank)
    return dataclasses.replace(config, device=device, parallel=parallel)
