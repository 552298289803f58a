"""KVEvents: publishes what the prefix cache stores and removes, for external load balancers.

Messages have vLLM's names and encoding. Each is (topic, sequence number, batch): the number has 8
bytes, the batch is msgpack. A ROUTER socket sends past batches again, from the number that it is
sent. Its last reply has the number -1 and no batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from penstock.config.kv_events import KVEventsSettings
from penstock.kvcache.manager import CacheableRequest
from penstock.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
LINGER_MS = 1000  # for sending the last batches
CLOSE = b""  # instead of a batch


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Consecutive blocks of a prefix are cached from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None  # of the block before them; None: they are the first
    token_ids: list[int]  # of these blocks
    block_size: int
    lora_id: int | None = None  # of no use: see `lora_name`
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    ts: float  # seconds since 1970
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class KVEvents:
    """Observes a prefix cache. `flush` publishes what has happened since the last call.

    A thread sends, and answers requests for past batches.
    """

    def __init__(self, settings: KVEventsSettings, rank: int, block_size: int, medium: str) -> None:
        """Open the sockets. Raises `ConfigError` if an address cannot be used."""
        self._rank = rank
        self._block_size = block_size
        self._medium = medium
        self._events: list[KVEvent] = [AllBlocksCleared()]  # what an engine before it had cached
        self._topic = settings.topic.encode()
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open(settings)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self.flush()

    def _open(self, settings: KVEventsSettings) -> None:
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(settings.hwm)
        endpoint = settings.at_rank(settings.endpoint, self._rank)
        if "*" in endpoint or endpoint.startswith("ipc://"):
            _bind(self._pub, "endpoint", endpoint)
        else:
            self._pub.connect(endpoint)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(settings.buffer_steps + 1)  # one whole answer; more is dropped
        if settings.replay_endpoint is not None:
            address = settings.at_rank(settings.replay_endpoint, self._rank)
            _bind(self._replay, "replay_endpoint", address)
        self._outbox = self._context.socket(zmq.PAIR)
        self._inbox = self._context.socket(zmq.PAIR)
        self._outbox.set_hwm(settings.max_queue_size)
        self._inbox.bind("inproc://batches")
        self._outbox.connect("inproc://batches")

    # -- what happens in the cache

    def on_stored(
        self, request: CacheableRequest, numbers: Sequence[int], hash_of: Callable[[int], bytes]
    ) -> None:
        start = 0
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
                self._store(request, numbers[start], numbers[end - 1] + 1, hash_of)
                start = end

    def _store(
        self, request: CacheableRequest, first: int, end: int, hash_of: Callable[[int], bytes]
    ) -> None:
        self._events.append(
            BlockStored(
                block_hashes=[hash_of(number) for number in range(first, end)],
                parent_block_hash=hash_of(first - 1) if first else None,
                token_ids=request.token_ids[first * self._block_size : end * self._block_size],
                block_size=self._block_size,
                medium=self._medium,
                lora_name=request.adapter_name,
            )
        )

    def on_removed(self, block_hash: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash], self._medium))

    def on_cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """Publish the events since the last call as one batch. Waits if too many are queued."""
        if self._events:
            events, self._events = self._events, []
            batch = KVEventBatch(time.time(), events, self._rank)
            self._outbox.send(msgspec.msgpack.encode(batch))

    def close(self) -> None:
        """Send what is queued and close the sockets."""
        self._outbox.send(CLOSE)
        self._thread.join()
        self._context.destroy(linger=LINGER_MS)

    # -- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        number = 0
        while True:
            poller.poll()
            while self._inbox.poll(0):  # all of them first: a replay is complete
                batch = self._inbox.recv()
                if batch == CLOSE:
                    return
                number_bytes = number.to_bytes(NUMBER_BYTES, "big")
                self._pub.send_multipart((self._topic, number_bytes, batch))
                self._past.append((number_bytes, batch))
                number += 1
            if self._replay.poll(0):
                self._send_again(self._replay.recv_multipart())

    def _send_again(self, frames: list[bytes]) -> None:
        """Answer (client, empty, number): the batches from this number on."""
        if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
            logger.warning("A request to replay KV events is malformed: %d frames", len(frames))
            return
        client, _, first = frames
        for number, batch in self._past:
            if number >= first:  # big-endian: they compare like numbers
                self._replay.send_multipart((client, b"", number, batch))
        self._replay.send_multipart((client, b"", END_OF_REPLAY, b""))


def _bind(socket: zmq.Socket[bytes], name: str, address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv_events_config: cannot bind {name} {address}: {error}; choose another address"
        ) from error
