"""Replica: one of the engines of a set, with its successors, as the set sees it."""

from __future__ import annotations

from penstock.engine.client import ReplicaState, ReplicaStatus
from penstock.engine.dispatch import Dispatch


class Replica:
    """A dispatch, and what the set knows about it."""

    def __init__(self, dispatch: Dispatch, version: int = 0) -> None:
        self.dispatch = dispatch
        self.version = version  # of the model
        self.is_draining = False  # takes no new requests
        self.ends_version = False  # draining, and its successor has another version

    @property
    def index(self) -> int:
        return self.dispatch.index

    @property
    def num_requests(self) -> int:
        return len(self.dispatch.running) + len(self.dispatch.suspects)

    @property
    def takes_requests(self) -> bool:
        return not self.is_draining and self.dispatch.is_open

    @property
    def state(self) -> ReplicaState:
        if self.dispatch.is_lost:
            return "failed"
        if self.dispatch.info is None:
            return "starting"
        if self.is_draining:
            return "draining"
        if not self.dispatch.is_healthy:
            return "restarting"
        return "serving" if self.dispatch.is_open else "quarantine"

    @property
    def status(self) -> ReplicaStatus:
        stats = self.dispatch.stats
        if stats is None:
            return ReplicaStatus(self.index, self.state, self.num_requests)
        now = stats.scheduler
        return ReplicaStatus(
            *(self.index, self.state, self.num_requests),
            *(now.num_running, now.num_waiting, now.kv_cache_usage),
        )
