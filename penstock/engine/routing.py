"""ReplicaRouter: decides which replica runs a request. No I/O, no clock.

Block hashes are the same in every process. So the router computes a request's hashes itself and
looks up which replica has cached how much of its prompt.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.config.engine import RoutingPolicy
from penstock.engine.messages import EngineInfo
from penstock.kvcache.landmarks import landmarks, split_keys
from penstock.protocol.prefix import CacheUpdate, PrefixKeys
from penstock.protocol.request import EngineRequest

MAX_KEYS = 2**19  # in the index, over all replicas
MAX_SESSIONS = 2**16  # the least recently used are forgotten

# Costs, each relative to computing one prompt token of the request:
WAITING_TOKENS = 0.25  # one prompt token that the replica has yet to compute for others
REQUEST_TOKENS = 128  # one more unfinished request on the replica
EXCESS_TOKENS = 0.25  # one token more of recent work
ADAPTER_TOKENS = 1024  # loading an adapter that the replica has not used lately

MAX_IMBALANCE = 1.25  # unfinished requests of a replica, relative to the mean
ALWAYS_ALLOWED = 4  # unfinished requests of a replica, whatever the mean is
MAX_RECENT = 1.1  # recent requests of a replica, relative to the mean
RECENT_SLACK = 3  # recent requests of a replica above that
RECENT_PER_REPLICA = 64  # requests that count as recent, roughly
OUTPUT_TOKENS = 384  # work of a request besides its prompt, in prompt tokens
MAX_WEIGHT = 2.0**512

_Found = Mapping[PrefixKeys | None, Sequence[tuple[int, bytes]]]  # landmarks: (tokens, key)


@dataclass
class _Replica:
    """What the router knows of a replica."""

    bit: int  # in `ReplicaRouter._holders`
    prefix_keys: PrefixKeys | None
    num_kv_blocks: int
    keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # the oldest first
    waiting: dict[str, int] = field(default_factory=dict)  # tokens to compute before the first
    num_waiting_tokens: int = 0  # their sum
    num_requests: int = 0  # unfinished
    recent: float = 0.0  # tokens of recent work, weighted: the older the less
    num_recent: float = 0.0  # recent requests, weighted likewise


class ReplicaRouter:
    """Chooses replicas by what they have cached and by their load.

    prefix: the replica with the least cost, which is the prompt tokens that are not cached there,
    plus its load. A prefix is copied to another replica once serving it where it is has cost as
    much. No replica gets more than `MAX_IMBALANCE` times the mean number of unfinished requests.
    Under load, none gets many more than the mean of recent requests either, sessions apart. A
    request is expected to publish its prompt on its replica, so others with the same prefix follow
    at once. least-loaded: the fewest unfinished requests. round-robin: each in turn. Requests of a
    session stay on their replica while the bound on unfinished ones allows it, except with
    round-robin.

    A choice never changes a request's tokens.
    """

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._replicas: dict[int, _Replica] = {}
        self._placed: dict[str, int] = {}  # unfinished requests: their replica
        self._holders: dict[bytes, int] = {}  # landmarks: a bit for each replica that has it
        self._sessions: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._weight = 1.0  # of a request now; earlier ones have less
        self._last = -1  # the replica chosen last

    # -- replicas

    def add(self, replica: int, info: EngineInfo) -> None:
        """An engine is ready, with an empty cache."""
        self.remove(replica)
        used = {known.bit for known in self._replicas.values()}
        bit = next(1 << i for i in range(len(used) + 1) if 1 << i not in used)
        added = _Replica(bit, info.prefix_keys, info.num_kv_blocks)
        # It is as busy as the others have been of late, or it would get everything now.
        others = self._replicas.values()
        added.recent = min((known.recent for known in others), default=0.0)
        added.num_recent = min((known.num_recent for known in others), default=0.0)
        self._replicas[replica] = added

    def remove(self, replica: int) -> None:
        """A replica is gone, with its cache and its requests."""
        removed = self._replicas.pop(replica, None)
        if removed is not None:
            self._drop(removed, list(removed.keys))
            self._placed = {i: at for i, at in self._placed.items() if at != replica}

    def published(self, replica: int, update: CacheUpdate) -> None:
        """A replica reports what changed in its prefix cache."""
        known = self._replicas.get(replica)
        if known is not None:
            self._drop(known, list(known.keys) if update.cleared else ())
            self._drop(known, split_keys(update.removed))
            self._keep(known, split_keys(update.stored))

    # -- requests

    def choose(self, request: EngineRequest, session: str | None, allowed: Collection[int]) -> int:
        """Place a request on one of the `allowed` replicas. Choosing again moves it."""
        self.finished(request.request_id)
        candidates = sorted(allowed)
        found = self._landmarks(request, candidates)
        hits = self._hits(found, candidates) if request.read_prefix_cache else {}
        if len(candidates) == 1:
            chosen = candidates[0]
        elif self._policy == "round-robin":
            chosen = next((i for i in candidates if i > self._last), candidates[0])
        else:
            chosen = self._choose(request, session, self._within_bound(candidates), hits)
        self._last = chosen
        self._place(request, chosen, found, hits.get(chosen, 0))
        if session is not None and self._policy != "round-robin":
            self._sessions[request.tenant, session] = chosen
            self._sessions.move_to_end((request.tenant, session))
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def started(self, request_id: str) -> None:
        """A request got its first token."""
        placed = self._placed.get(request_id)
        if placed is not None:
            replica = self._replicas[placed]
            replica.num_waiting_tokens -= replica.waiting.pop(request_id, 0)

    def finished(self, request_id: str) -> None:
        """A request left its replica: it ended, or runs elsewhere."""
        self.started(request_id)
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            self._replicas[placed].num_requests -= 1

    def _place(
        self, request: EngineRequest, chosen: int, found: _Found, num_cached_tokens: int
    ) -> None:
        """Count a request, and expect its prompt in the cache of its replica."""
        replica = self._replicas[chosen]
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        num_new_tokens = num_tokens - num_cached_tokens
        self._placed[request.request_id] = chosen
        replica.num_requests += 1
        replica.waiting[request.request_id] = num_new_tokens
        replica.num_waiting_tokens += num_new_tokens
        marks = found.get(replica.prefix_keys, ())
        self._keep(replica, [key for _, key in reversed(marks)])  # the end is dropped first
        if request.adapter is not None:
            self._keep(replica, [_adapter_key(request)])
        replica.recent += self._weight * (num_new_tokens + OUTPUT_TOKENS)
        replica.num_recent += self._weight
        self._weight *= 1 + 1 / (RECENT_PER_REPLICA * len(self._replicas))
        if self._weight > MAX_WEIGHT:
            for known in self._replicas.values():
                known.recent /= self._weight
                known.num_recent /= self._weight
            self._weight = 1.0

    # -- the choice

    def _choose(
        self,
        request: EngineRequest,
        session: str | None,
        candidates: list[int],
        hits: Mapping[int, int],
    ) -> int:
        if session is not None:
            home = self._sessions.get((request.tenant, session))
            if home in candidates:
                return home
        if self._policy == "least-loaded":
            return min(candidates, key=self._load)
        with_adapter = -1  # all of them
        if request.adapter is not None:
            with_adapter = self._holders.get(_adapter_key(request), 0)

        def cost(candidate: int) -> float:
            replica = self._replicas[candidate]
            return (
                WAITING_TOKENS * replica.num_waiting_tokens
                + REQUEST_TOKENS * replica.num_requests
                + EXCESS_TOKENS * replica.recent / self._weight
                + (0 if replica.bit & with_adapter else ADAPTER_TOKENS)
                - hits.get(candidate, 0)
            )

        return min(self._not_overused(candidates), key=cost)

    def _load(self, candidate: int) -> tuple[int, int, float]:
        replica = self._replicas[candidate]
        return replica.num_requests, replica.num_waiting_tokens, replica.recent

    def _within_bound(self, candidates: list[int]) -> list[int]:
        """The candidates that may get one more request."""
        total = sum(self._replicas[i].num_requests for i in candidates) + 1
        bound = max(math.ceil(MAX_IMBALANCE * total / len(candidates)), ALWAYS_ALLOWED)
        return [i for i in candidates if self._replicas[i].num_requests < bound]

    def _not_overused(self, candidates: list[int]) -> list[int]:
        """The candidates that have not had many more requests of late than the mean.

        All of them while there are fewer unfinished requests than replicas: nobody waits then.
        """
        replicas = [self._replicas[i] for i in candidates]
        if sum(replica.num_requests for replica in replicas) < len(replicas):
            return candidates
        recent = sum(replica.num_recent for replica in replicas) / len(replicas)
        most = MAX_RECENT * recent + RECENT_SLACK * self._weight
        return [i for i in candidates if self._replicas[i].num_recent <= most]

    # -- the index

    def _landmarks(self, request: EngineRequest, candidates: list[int]) -> _Found:
        """The landmarks of a request, for each kind of hash that the candidates use.

        There is one, except while another version of the model is rolled out.
        """
        if self._policy != "prefix" or len(candidates) == 1:
            return {}
        kinds = {self._replicas[i].prefix_keys for i in candidates} - {None}
        return {kind: landmarks(kind, request) for kind in kinds if kind is not None}

    def _hits(self, found: _Found, candidates: Iterable[int]) -> dict[int, int]:
        """Prompt tokens that the candidates have cached. Those with none are left out."""
        by_bit = {self._replicas[i].bit: i for i in candidates}
        hits: dict[int, int] = {}
        for marks in found.values():
            missing = sum(by_bit)  # bits of candidates without a hit so far
            for num_tokens, key in reversed(marks):
                holders = self._holders.get(key, 0) & missing
                missing ^= holders
                while holders:
                    bit = holders & -holders
                    hits[by_bit[bit]] = num_tokens
                    holders ^= bit
                if not missing:
                    break
        return hits

    def _keep(self, replica: _Replica, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in replica.keys:
                replica.keys.move_to_end(key)
            else:
                replica.keys[key] = None
                self._holders[key] = self._holders.get(key, 0) | replica.bit
        most = min(replica.num_kv_blocks, MAX_KEYS // len(self._replicas))
        while len(replica.keys) > most:
            self._drop(replica, [next(iter(replica.keys))])

    def _drop(self, replica: _Replica, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in replica.keys:
                del replica.keys[key]
                self._holders[key] ^= replica.bit
                if not self._holders[key]:
                    del self._holders[key]


def _adapter_key(request: EngineRequest) -> bytes:
    """What stands for a request's adapter in the index. Landmarks are shorter."""
    assert request.adapter is not None
    return b"adapter " + request.adapter.digest.encode()
