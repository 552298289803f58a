"""ReplicaOperations: adds, empties, restarts and removes replicas while they serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator

from penstock.config import EngineConfig
from penstock.engine.replica import Replica
from penstock.engine.replicas import ReplicaSet, replica_config
from penstock.protocol.errors import EngineDeadError, InputError, PenstockError

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.05  # between looks at a replica that is being emptied


class ReplicaOperations:
    """Changes a set of replicas, one change at a time. No request fails for it.

    To empty a replica, it gets no new requests, and those on it have `timeout_s` seconds to end.
    Then they go on elsewhere, if they can: a request that has tokens never changes the version of
    the model. Others are waited for.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        assert replicas.config is not None, "the first engines come first"
        self._replicas = replicas
        self._config = replicas.config
        self._version = 0
        self._turn = asyncio.Lock()

    async def add(self) -> int:
        """Start one more replica. Returns its index. Raises the engine's error if that fails."""
        async with self._turn:
            members = self._replicas.members
            index = next(index for index in range(len(members) + 1) if index not in members)
            logger.info("Adding replica %d", index)
            replica = Replica(self._replicas.start(index), self._version)
            self._replicas.enter(replica)
            try:
                await replica.dispatch.load(replica_config(self._config, index))
            except BaseException:
                self._replicas.leave(index)
                await replica.dispatch.close()
                raise
            return index

    async def drain(self, index: int, timeout_s: float) -> None:
        """Empty a replica. It gets requests again after a restart."""
        async with self._turn:
            replica = self._find(index)
            self._check_others(index)
            await self._empty(replica, timeout_s, replica.version)

    async def restart(self, index: int, timeout_s: float) -> None:
        """Give a replica another engine. Also brings back one that failed or was drained."""
        async with self._turn:
            with self._last_chance():
                await self._restart(self._find(index), timeout_s, self._config, self._version)

    async def remove(self, index: int, timeout_s: float) -> None:
        """Empty a replica and take it away."""
        async with self._turn:
            replica = self._find(index)
            self._check_others(index)
            await self._empty(replica, timeout_s, replica.version)
            self._replicas.leave(index)
            await replica.dispatch.close()
            logger.info("Replica %d is removed", index)

    async def rolling_restart(self, timeout_s: float, config: EngineConfig | None = None) -> None:
        """Restart all replicas, one after the other, with another configuration if one is given.

        If one fails to start with that, all go back to what they had, and its error is raised.
        """
        async with self._turn:
            before = self._config, self._version
            after = before if config is None else (config, self._version + 1)
            with self._last_chance():
                try:
                    await self._restart_all(sorted(self._replicas.members), timeout_s, *after)
                except PenstockError as error:
                    if config is None:
                        raise
                    logger.error("Going back to the old version: %s", error)
                    members = self._replicas.members.items()
                    changed = [index for index, item in members if item.version == after[1]]
                    await self._restart_all(changed, timeout_s, *before)
                    raise
            self._config, self._version = after
            self._replicas.config = self._config

    async def _restart_all(
        self, indexes: Iterable[int], timeout_s: float, config: EngineConfig, version: int
    ) -> None:
        for index in indexes:
            await self._restart(self._find(index), timeout_s, config, version)

    async def _restart(
        self, replica: Replica, timeout_s: float, config: EngineConfig, version: int
    ) -> None:
        index = replica.index
        logger.info("Restarting replica %d", index)
        # The process imports its modules while the other one is emptied.
        successor = Replica(self._replicas.start(index), version)
        try:
            await self._empty(replica, timeout_s, version)
            self._replicas.enter(successor)
            await replica.dispatch.close()
            await successor.dispatch.load(replica_config(config, index))
        except BaseException:
            await successor.dispatch.close()
            replica.is_draining = replica.ends_version = False
            raise

    @contextlib.contextmanager
    def _last_chance(self) -> Iterator[None]:
        """A restart that fails may leave no replica."""
        try:
            yield
        except BaseException as error:
            if not self._replicas.has_living:
                self._replicas.lose(EngineDeadError(f"the last replica was not restarted: {error}"))
            raise

    async def _empty(self, replica: Replica, timeout_s: float, version: int) -> None:
        """Wait until a replica has no requests. `version` is that of its successor."""
        replica.is_draining, replica.ends_version = True, version != replica.version
        self._replicas.place_waiting()
        deadline, leaving = time.monotonic() + timeout_s, set[str]()
        while self._replicas.has_work_for(replica) and not replica.dispatch.is_lost:
            if not replica.is_draining:
                raise EngineDeadError(f"replica {replica.index} is needed: no other one is left")
            if time.monotonic() >= deadline or not self._replicas.takes_requests:
                running = [item for item in replica.dispatch.running if item not in leaving]
                movable = self._replicas.movable(running, version)
                replica.dispatch.vacate(movable)
                leaving.update(movable)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _find(self, index: int) -> Replica:
        members = self._replicas.members
        if index not in members:
            there_are = ", ".join(map(str, sorted(members)))
            raise InputError(f"there is no replica {index} here, only {there_are}", "replica")
        return members[index]

    def _check_others(self, index: int) -> None:
        """Refuse to take away the last replica that takes requests."""
        members = self._replicas.members.items()
        if not any(item.takes_requests for other, item in members if other != index):
            raise InputError(
                f"no replica but {index} takes requests now: add another one first", "replica"
            )
