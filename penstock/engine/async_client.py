"""AsyncEngineClient: the engine in another process, driven from an event loop without torch."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from penstock.config import EngineConfig
from penstock.engine import messages
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.observer import Observer, RequestRecord
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import ConfigError, EngineDeadError, ModelError, PenstockError
from penstock.protocol.request import EngineRequest

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
LAST_WORDS_TIMEOUT_S = 1.0


class DeltaStream:
    """The deltas of some requests, in batches as they come, until all have finished.

    Iterating raises `EngineDeadError`, at once, if the engine dies, and whatever `fail` is given.
    Close it when done: that aborts what is unfinished.
    """

    def __init__(self, client: AsyncEngineClient, request_ids: Iterable[str]) -> None:
        self._client = client
        self._unfinished = set(request_ids)
        self._deltas: list[EngineDelta] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def push(self, delta: EngineDelta) -> None:
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.request_id)
        self._deltas.append(delta)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Make whoever iterates get `error` in place of what would come next."""
        self._error = self._error or error
        self._news.set()

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """End some of the requests early, for `reason`; no more deltas come for them."""
        self._unfinished.difference_update(request_ids)
        self._client.finish(request_ids, reason)

    def close(self) -> None:
        """Abort what is unfinished. Safe to call twice."""
        unfinished, self._unfinished = list(self._unfinished), set()
        self._client.finish(unfinished, FinishReason.ABORT)

    def __aiter__(self) -> AsyncIterator[list[EngineDelta]]:
        return self

    async def __anext__(self) -> list[EngineDelta]:
        if not self._deltas and self._error is None:
            if not self._unfinished:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas


class AsyncEngineClient:
    """Starts an engine process, sends it requests and hands out their deltas.

    It keeps every unfinished request with the tokens that came for it (`records`): all that is
    needed to run them again on another engine. Everything but the constructor belongs to one
    event loop.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.observers = list(observers)
        self.records: dict[str, RequestRecord] = {}  # unfinished requests
        self.stats: EngineStats | None = None  # the latest
        self.info: EngineInfo | None = None
        self.death: EngineDeadError | None = None
        self._streams: dict[str, DeltaStream] = {}
        self._failure: messages.Failed | None = None
        self._news = asyncio.Event()  # that the start waits for
        self._is_connected = False
        self._is_closing = False

    # -- the process

    def spawn(self) -> None:
        """Start the process: it imports what it needs while the caller does other things."""
        self._loop = asyncio.get_running_loop()
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        address = f"ipc://{self._folder}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.engine.process", address],
            stdin=subprocess.PIPE,  # it ends when this pipe closes, however we end
            start_new_session=True,  # Ctrl-C in a terminal is for us alone
        )
        self._receiver = asyncio.create_task(self._receive())
        watch = threading.Thread(target=self._watch, name="engine-watch", daemon=True)
        watch.start()

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Have the engine load its model. Raises what kept it from that."""
        while not self._is_connected:
            await self._start_news()
        self._send(messages.LOAD, messages.encode(config))
        while self.info is None:
            await self._start_news()
        return self.info

    async def _start_news(self) -> None:
        """Wait for the start to get on; raise what ended it."""
        if self.death is None:
            self._news.clear()
            await self._news.wait()
        if self.death is not None:
            raise self._start_error(self.death)

    def _start_error(self, death: EngineDeadError) -> PenstockError:
        for error_class in (ConfigError, ModelError):
            if self._failure is not None and self._failure.kind == error_class.__name__:
                return error_class(self._failure.error)
        return death

    async def close(self) -> None:
        """Stop the process; requests that are left get `EngineDeadError`."""
        self._is_closing = True
        self._fail_all(EngineDeadError("the server is shutting down"))
        if self.process.poll() is None:
            if self._is_connected:
                self._send(messages.CLOSE)
            else:
                self.process.kill()
            try:
                await asyncio.to_thread(self.process.wait, CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self._receiver.cancel()
        self._remove_socket_file()
        self._context.destroy(linger=0)

    def kill(self) -> None:
        """End the process at once, for when there is no time to close."""
        self._is_closing = True
        self.process.kill()
        self._remove_socket_file()

    def _watch(self) -> None:
        code = self.process.wait()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._on_exit(code)))

    async def _on_exit(self, code: int) -> None:
        if self._is_closing:
            return
        deadline = time.monotonic() + LAST_WORDS_TIMEOUT_S
        while code == 1 and self._failure is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)  # it said why, and that is still on its way
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = "" if self._failure is None else f": {self._failure.error}"
        logger.error("The engine process died (%s)%s", how, why)
        self.death = EngineDeadError(f"the engine died ({how}){why}")
        self._remove_socket_file()
        self._fail_all(EngineDeadError("the engine died; nothing can be run until it is back"))
        self._news.set()

    def _remove_socket_file(self) -> None:
        """A connection outlives the file that it was made through."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- requests

    @property
    def is_healthy(self) -> bool:
        return self.info is not None and self.death is None and not self._is_closing

    def submit(self, requests: Sequence[EngineRequest]) -> DeltaStream:
        """Send requests to the engine; their deltas come from the one stream returned."""
        if not self.is_healthy:
            raise EngineDeadError("the engine is not running; nothing can be run until it is back")
        stream = DeltaStream(self, [request.request_id for request in requests])
        for request in requests:
            record = RequestRecord(request, submitted_at=time.monotonic())
            self.records[request.request_id] = record
            self._streams[request.request_id] = stream
            self._send(messages.ADD, request.request_id.encode(), messages.encode(request))
            for observer in self.observers:
                observer.on_submit(record)
        return stream

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """End requests early. Ids of requests that are over already are ignored."""
        known = [request_id for request_id in request_ids if request_id in self.records]
        for request_id in known:
            self._retire(self.records[request_id], reason)
        if known and self.death is None:
            self._send(messages.FINISH, messages.encode(messages.Finish(known)))

    def fail_all(self, error: Exception) -> None:
        """End every request now; whoever waits for one gets `error`."""
        request_ids = list(self.records)
        self._fail_all(error)
        if request_ids and self.death is None:
            self._send(messages.FINISH, messages.encode(messages.Finish(request_ids)))

    def replay(self, request_id: str) -> EngineRequest:
        """The request as it must be sent to go on after the tokens that have come for it."""
        record = self.records[request_id]
        seen = record.request.output_token_ids + record.token_ids
        return msgspec.structs.replace(record.request, output_token_ids=seen)

    def _send(self, *frames: bytes) -> None:
        # To a peer that is there, without a high-water mark, a send never has to wait: its
        # future is done already.
        future = self._socket.send_multipart(frames)
        assert isinstance(future, asyncio.Future)
        assert future.done()

    async def _receive(self) -> None:
        while True:
            (frame,) = await self._socket.recv_multipart()
            answer = messages.decode_answer(frame)
            if isinstance(answer, messages.Outputs):
                self._on_outputs(answer)
            elif isinstance(answer, messages.Connected):
                self._remove_socket_file()
                self._is_connected = True
                self._news.set()
            elif isinstance(answer, messages.Ready):
                self.info = answer.info
                for observer in self.observers:
                    observer.on_ready(answer.info)
                self._news.set()
            else:
                self._failure = answer

    def _on_outputs(self, outputs: messages.Outputs) -> None:
        now = time.monotonic()
        for delta in outputs.deltas:
            record = self.records.get(delta.request_id)
            if record is not None:  # its client may have left meanwhile
                self._on_delta(record, delta, now)
        if outputs.stats is not None:
            self.stats = outputs.stats
            for observer in self.observers:
                observer.on_stats(outputs.stats)

    def _on_delta(self, record: RequestRecord, delta: EngineDelta, now: float) -> None:
        record.num_cached_tokens = max(record.num_cached_tokens, delta.num_cached_tokens)
        if delta.token_ids:
            record.prefill_s += delta.prefill_s
            record.token_ids += delta.token_ids
            previous_at, record.last_token_at = record.last_token_at, now
            if record.first_token_at is None:
                record.first_token_at = now
            for observer in self.observers:
                observer.on_tokens(record, len(delta.token_ids), previous_at)
        stream = self._streams[delta.request_id]
        if delta.finish_reason is not None:
            self._retire(record, delta.finish_reason)
        stream.push(delta)

    def _retire(self, record: RequestRecord, reason: FinishReason) -> None:
        del self.records[record.request_id]
        del self._streams[record.request_id]
        record.finished_at, record.finish_reason = time.monotonic(), reason
        for observer in self.observers:
            observer.on_finish(record)

    def _fail_all(self, error: Exception) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)
        for record in list(self.records.values()):
            self._retire(record, FinishReason.ERROR)
