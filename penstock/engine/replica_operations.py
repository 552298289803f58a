"""ReplicaOperations: adds, empties, restarts and removes replicas while they serve."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time

from penstock.config import EngineConfig
from penstock.engine.dispatch import Dispatch
from penstock.engine.replicas import Replica, ReplicaSet, replica_config
from penstock.protocol.errors import EngineDeadError, InputError, PenstockError

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.05  # between looks at a replica that is being emptied


class ReplicaOperations:
    """Changes a set of replicas, one at a time. No request fails for it.

    `config` is what replicas are started with from now on.
    """

    def __init__(self, replicas: ReplicaSet, config: EngineConfig) -> None:
        self._replicas = replicas
        self.config = config
        self._turn = asyncio.Lock()
