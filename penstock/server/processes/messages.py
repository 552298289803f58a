"""What the parent and its API processes tell each other, apart from requests and deltas."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.config import EngineConfig, ServerConfig
from penstock.engine.client import ReplicaStatus
from penstock.engine.messages import EngineInfo
from penstock.protocol.adapter import Adapter
from penstock.server.responses.store import Stored, StoredConversation, StoredResponse


class ApiHello(msgspec.Struct, frozen=True):
    """The first message to an API process, so that it can load its frontend."""

    number: int  # of all API processes that were started
    config: EngineConfig
    server_config: ServerConfig
    version: EngineConfig  # of the engines, if another version was rolled through


class Status(msgspec.Struct, frozen=True):
    """What an API process knows of the server, a few milliseconds later."""

    replicas: list[ReplicaStatus]
    max_num_seqs: int
    is_healthy: bool
    num_others: int  # unfinished requests of other API processes
    others_by_tenant: dict[str, int] = {}  # with fair scheduling


class AdapterInfo(msgspec.Struct, frozen=True):
    """A version of an adapter. Parent and API processes know it by its number."""

    number: int
    adapter: Adapter
    root: str
    parent: str
    created: int


class Begin(msgspec.Struct, frozen=True):
    """The engines are loaded: serve."""

    info: EngineInfo
    config: EngineConfig  # of the engines
    status: Status
    adapters: list[AdapterInfo]
    shows_fingerprint: bool  # False while two versions of the model are served


@dataclass(frozen=True)
class Entry:
    """An entry of the store: one of the two."""

    response: StoredResponse | None = None
    conversation: StoredConversation | None = None

    @classmethod
    def of(cls, stored: Stored | None) -> Entry:
        if isinstance(stored, StoredResponse):
            return cls(response=stored)
        return cls(conversation=stored)

    @property
    def stored(self) -> Stored | None:
        return self.response or self.conversation
