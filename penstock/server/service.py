"""Service: decides which requests are admitted, and runs them. All endpoints share it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

import msgspec

from penstock.config import EngineConfig, ServerConfig
from penstock.confined.scope import JobScope, NeedsTurn
from penstock.engine import messages
from penstock.engine.client import EngineClient
from penstock.engine.ledger import DeltaStream
from penstock.engine.observer import RequestRecord
from penstock.engine.outputs import outputs_of
from penstock.protocol.delta import EngineDelta
from penstock.protocol.errors import EngineDeadError, InputError, PenstockError, RequestFault
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.request import EngineRequest
from penstock.server.adapters.holds import current_hold
from penstock.server.http.access import salt_by_tenant, tenant_label
from penstock.server.http.errors import NotFound, Overloaded, RequestTimeout
from penstock.server.http.routing import RANK_HEADER, current_route
from penstock.text.frontend import Frontend, PreparedRequest

if TYPE_CHECKING:
    from penstock.server.adapters.registry import ServedAdapters
    from penstock.server.operations.tracing import Tracing
    from penstock.server.responses.tool_servers import ToolServers

NUM_TEXT_SLOTS = 4  # threads that compute at once
# Requests with media, long texts or templates of their own have separate threads, in which they
# also wait for confined processes and other servers. Each tenant uses some of them at a time. Its
# further requests wait, without a thread.
NUM_WAITING_THREADS = 256
NUM_TURNS = 32
# Requests above this size are parsed in threads and have separate slots: thousands of items take
# tens of milliseconds, millions of characters take seconds.
LARGE_BODY_BYTES = 32 * 1024
NUM_LARGE_SLOTS = 2
MAX_COUNTED_TOKENS = 2**20  # in a text that is only tokenized or counted
MAX_FIELDS_BYTES = 64 * 1024 * 1024  # of all completions of a request, without their prompts
MAX_NAMES = 16  # of models in an error
T = TypeVar("T")

current_body_bytes: ContextVar[int] = ContextVar("current_body_bytes", default=0)
"""The size of the current request, including the stored items that it continues."""


def is_large_request() -> bool:
    """Whether the current request uses the threads for large requests."""
    return current_body_bytes.get() > LARGE_BODY_BYTES


class Service:
    """The served model. There is one per app. Use it from one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        server_config: ServerConfig,
        client: EngineClient,
        frontend: Frontend,
        tool_servers: ToolServers | None = None,
        fingerprint: str | None = None,
        adapters: ServedAdapters | None = None,
        tracing: Tracing | None = None,
        engine_id_suffix: str = "",
    ) -> None:
        """`engine_id_suffix` tells the engine's requests from those of other API processes."""
        self.config = config
        self.server_config = server_config
        self.client = client
        self.frontend = frontend
        self.text_pool = None if frontend is None else frontend.pool
        self.tool_servers = tool_servers
        self.fingerprint = fingerprint  # see `system_fingerprint` in run.py
        self.adapters = adapters  # None without enable_lora
        self.tracing = tracing  # None without otlp_traces_endpoint
        if tool_servers is not None:
            tool_servers.tracing = tracing
        self.model_names = config.model.names  # these stay if another version is rolled through
        self.root = config.model.model  # the version that is served
        self.created = int(time.time())
        self.is_draining = False
        # Called when a completion with tools has ended: whether it was streamed, whether tools were
        # called, and the API.
        self.on_tool_turn: Callable[[bool, bool, str], None] = lambda *_: None
        self._numbers = itertools.count()
        self._engine_id_suffix = engine_id_suffix
        self._threads = ThreadPoolExecutor(NUM_TEXT_SLOTS, thread_name_prefix="text")
        self._slots = threading.Semaphore(NUM_TEXT_SLOTS)
        self._large_threads = ThreadPoolExecutor(NUM_LARGE_SLOTS, thread_name_prefix="large")
        self._large_slots = threading.Semaphore(NUM_LARGE_SLOTS)
        self._waiting_threads = ThreadPoolExecutor(NUM_WAITING_THREADS, thread_name_prefix="wait")
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()  # by tenant, while in use

    def close(self) -> None:
        for threads in (self._threads, self._large_threads, self._waiting_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.text_pool is not None:
            self.text_pool.close()
        if self.frontend is not None and self.frontend.media is not None:
            self.frontend.media.close()
        if self.adapters is not None:
            self.adapters.close()
        if self.tracing is not None:
            self.tracing.close()

    # -- admission

    def base_name(self, name: str | None) -> str | None:
        """Return the base model's name for the reply, or None if this is not one of its names.

        Without `served_model_name`, the value of `model` is also accepted.
        """
        model = self.config.model
        if name is None or (name == model.model and not model.served_model_name):
            return self.model_names[0]
        return name if name in self.model_names else None

    async def check_model(self, name: str | None) -> str:
        """Return the model name for the reply. Raises NotFound for an unknown name.

        If it names an adapter, the current HTTP request runs with it.
        """
        if (base := self.base_name(name)) is not None:
            return base
        assert name is not None
        if self.adapters is None or not await self.adapters.hold(name):
            raise self.no_model(name)
        return name

    def no_model(self, name: str) -> NotFound:
        adapters = self.adapters.versions if self.adapters is not None else []
        names = [*self.model_names, *(item.name for item in adapters)]
        served = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
        return NotFound(f"there is no model {name!r:.100} here; there is {served}", "model")

    async def admit(self, model: str | None) -> str:
        """Return the model name for the reply, if there is capacity for a request.

        Refuses a request for text if the model pools.
        """
        name = await self.check_model(model)
        self.frontend.check_generates()
        self.check_capacity()
        return name

    def check_pools(self) -> None:
        """Refuse a request for vectors if the model generates."""
        if self.frontend.pooling is None:
            raise InputError(
                "this model generates text and gives no vectors: use /v1/completions or "
                "/v1/chat/completions, or serve it with --runner pooling",
                "model",
            )

    def shows_token_ids(self, asked: bool | None) -> bool:
        """Whether logprobs show token ids instead of texts."""
        return self.server_config.return_tokens_as_token_ids if asked is None else asked

    def check_capacity(self) -> None:
        """Refuse new requests if the server is shutting down or the queue is full.

        While the engine restarts, requests wait for it.
        """
        self._check_not_over()
        self.check_queue(num_new=1)

    def _check_not_over(self) -> None:
        if self.is_draining or self.client.is_lost:
            raise EngineDeadError("the server is shutting down")

    @property
    def _capacity(self) -> int:
        """Maximum completions that are running or queued."""
        return self.client.max_num_seqs + self.server_config.max_queued_requests

    def check_queue(self, num_new: int) -> None:
        """Refuse `num_new` completions if the queue is full. Each completion takes one place."""
        if self._is_fair:
            self._check_share(num_new)
        num_now = self.client.num_requests
        if num_now + num_new > (capacity := self._capacity):
            message = (
                f"{num_now} completions are running or queued and {num_new} more "
                f"would exceed the {capacity} that this server takes; try again later"
            )
            if not self.client.is_healthy:
                raise EngineDeadError(f"the engine is restarting: {message}")
            raise Overloaded(message)

    @property
    def _is_fair(self) -> bool:
        return self.config.scheduler.scheduling_policy == "fair"

    @property
    def share(self) -> int:
        """Maximum completions of one client."""
        num_keys = len(self.server_config.api_key) if self._is_fair else 1
        return max(self._capacity // max(num_keys, 1), 1)

    def _check_share(self, num_new: int) -> None:
        """With fair scheduling, each API key gets an equal share of the queue."""
        tenant, share = tenant_label(), self.share
        num_own = self.client.num_requests_of(tenant)
        if num_own + num_new > share:
            raise Overloaded(
                f"{num_own} completions of this API key are running or queued and {num_new} more "
                f"would exceed its share of {share}; try again later"
            )

    def check_size(self, num_new: int, field: str) -> None:
        """Refuse a request that would not fit even on an idle server."""
        if num_new > (limit := self.share):
            whose = ", shared by the API keys" if limit < self._capacity else ""
            raise InputError(
                f"prompts times n must be at most {limit} here (--max-num-seqs and "
                f"--max-queued-requests together{whose}), got {num_new}: send several requests",
                field,
            )

    def check_health(self, replica: str | None = None) -> None:
        """Raise if no engine, or the one of this replica, can run requests now."""
        self._check_not_over()
        if not self.client.is_healthy:
            raise EngineDeadError("the engine is restarting; requests wait for it")
        if replica is None:
            return
        rank = self._check_rank(replica, "replica")
        (state,) = [item.state for item in self.client.status() if item.index == rank]
        if state != "serving":
            raise EngineDeadError(f"replica {rank} takes no requests now: it is {state}")

    # -- running requests

    async def in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work on text (tokenizing, rendering) without blocking the event loop.

        Large requests wait for each other. Small requests never wait for large ones. Work that
        turns out to need a turn starts again when its tenant has one. Cancelling this
        also cancels the confined job that the work waits for.
        """
        is_large = is_large_request()
        threads = self._large_threads if is_large else self._threads
        slots, tenant = self._large_slots if is_large else self._slots, tenant_label()
        try:
            scope = JobScope(tenant, slots, has_turn=False)
            return await _run_in(threads, scope, work, *arguments)
        except NeedsTurn:
            pass
        turns = self._turns.setdefault(tenant, asyncio.Semaphore(NUM_TURNS))
        async with turns:
            return await _run_in(self._waiting_threads, JobScope(tenant, slots), work, *arguments)

    @property
    def max_counted_tokens(self) -> int:
        """Maximum tokens of a text that is only tokenized or counted."""
        return max(MAX_COUNTED_TOKENS, self.frontend.max_model_len)

    async def in_thread_if_large(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work directly, or in a thread if the request is large."""
        if is_large_request():
            return await self.in_thread(work, *arguments)
        return work(*arguments)

    def engine_id(self, request_id: str) -> str:
        """Make an id for the engine. It is unique even if clients repeat their ids."""
        return f"{request_id}-{next(self._numbers)}{self._engine_id_suffix}"

    def outputs(
        self, requests: Sequence[PreparedRequest], timeout_s: float | None = None
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Stream the outputs of several requests, each with its request's index.

        A caller that stops early must close the generator. That aborts unfinished requests. Raises
        `RequestFault` if a request fails, `InputError` if a request is invalid or there are too
        many, and `Overloaded`, `RequestTimeout` and `EngineDeadError`.
        """
        children = [child for request in requests for child in request.children]
        field = "prompt" if len(requests) > 1 else "n"
        self.check_size(len(children), field)
        self.check_queue(len(children))  # again, now with the real number
        check_weight(children[0], len(children), field)
        run = self._stream if requests[0].beams is None else self._search_beams
        return run(requests, timeout_s)

    async def _search_beams(
        self, requests: Sequence[PreparedRequest], timeout_s: float | None
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        from penstock.engine.beam_search import beam_outputs

        ids = (self.engine_id(requests[0].request_id) for _ in itertools.count())
        searching = beam_outputs(requests, self._stream, ids, self._report_search)
        limit_s = self._time_limit(timeout_s)
        try:
            found = await asyncio.wait_for(searching, limit_s)
        except asyncio.TimeoutError:
            raise _timeout(limit_s) from None
        for index, output in enumerate(found):
            yield index, output

    def _report_search(self, records: Sequence[RequestRecord]) -> None:
        self.client.report_search(
            [replace(record, request=self._complete(record.request)) for record in records]
        )

    async def _stream(
        self, requests: Sequence[PreparedRequest], timeout_s: float | None = None
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        children = [child for request in requests for child in request.children]
        stream = self._submit(children)
        timer = self._start_timer(stream.fail, timeout_s)
        try:
            async for index, output in outputs_of(stream, requests):
                if output.error is not None:
                    raise _error_of(output)
                yield index, output
        finally:
            if timer is not None:
                timer.cancel()
            stream.close()

    async def run_to_end(
        self, requests: Sequence[EngineRequest], timeout_s: float | None
    ) -> list[EngineDelta]:
        """Run pooling requests. Returns the last delta of each, in order.

        Cancelling this aborts them. Raises the same errors as `outputs`.
        """
        stream = self._submit(requests)
        timer = self._start_timer(stream.fail, timeout_s)
        done: dict[str, EngineDelta] = {}
        try:
            async for deltas in stream:
                for delta in deltas:
                    if delta.error is not None:
                        raise _error_of(delta)
                    if delta.finish_reason is not None:
                        done[delta.request_id] = delta
        finally:
            if timer is not None:
                timer.cancel()
            stream.close()
        for request in requests:
            if done[request.request_id].payload is None:
                raise RequestFault("the request was aborted")
        return [done[request.request_id] for request in requests]

    def _submit(self, requests: Sequence[EngineRequest]) -> DeltaStream:
        """Submit requests, to the replica that the current HTTP request asks for."""
        rank, session = current_route.get()
        return self.client.submit(
            [self._complete(request) for request in requests],
            rank=None if rank is None else self._check_rank(rank),
            session=session,
        )

    def _check_rank(self, sent: str, field: str = RANK_HEADER) -> int:
        ranks = [item.index for item in self.client.status()]
        rank = int(sent) if sent.isascii() and sent.isdigit() and len(sent) < 6 else -1
        if rank not in ranks:
            there_are = ", ".join(map(str, ranks))
            raise InputError(f"there is no replica {sent[:20]!r} here, only {there_are}", field)
        return rank

    def _complete(self, child: EngineRequest) -> EngineRequest:
        """Return the request with the current tenant's label and salt, and its adapter."""
        tenant = tenant_label()
        cache_salt = child.cache_salt
        if not self.server_config.share_prefix_cache:
            cache_salt = salt_by_tenant(cache_salt)
        hold = current_hold.get()
        adapter = None if hold is None else hold.adapter
        if (tenant, cache_salt, adapter) == (child.tenant, child.cache_salt, child.adapter):
            return child
        return msgspec.structs.replace(child, tenant=tenant, cache_salt=cache_salt, adapter=adapter)

    def _start_timer(
        self, fail: Callable[[Exception], None], asked_s: float | None
    ) -> asyncio.TimerHandle | None:
        limit_s = self._time_limit(asked_s)
        if limit_s is None:
            return None
        return asyncio.get_running_loop().call_later(limit_s, fail, _timeout(limit_s))

    def _time_limit(self, asked_s: float | None) -> float | None:
        allowed = [s for s in (asked_s, self.server_config.request_timeout_s) if s is not None]
        return min(allowed, default=None)


def _timeout(limit_s: float | None) -> RequestTimeout:
    return RequestTimeout(
        f"the request took longer than {limit_s:g} s; allow more time or ask for less"
    )


def check_weight(child: EngineRequest, num: int, field: str) -> None:
    """Refuse long fields with many completions: the engine gets all fields with each of them."""
    if num == 1:
        return
    num_bytes = len(messages.encode(msgspec.structs.replace(child, prompt_token_ids=[]))) * num
    if num_bytes > MAX_FIELDS_BYTES:
        raise InputError(
            f"prompts times n must be lower for fields as long as these: {num} times, they take "
            f"{num_bytes} bytes, and may take {MAX_FIELDS_BYTES}",
            field,
        )


def _error_of(output: RequestOutput | EngineDelta) -> PenstockError:
    """Convert a request's error: the client's fault if it names a field, else the server's."""
    assert output.error is not None
    if output.can_retry:
        return Overloaded(output.error)
    if output.error_field is not None:
        return InputError(output.error, output.error_field)
    return RequestFault(output.error)


async def _run_in(
    threads: ThreadPoolExecutor, scope: JobScope, work: Callable[..., T], *arguments: object
) -> T:
    working = asyncio.get_running_loop().run_in_executor(threads, scope.run, work, *arguments)
    try:
        return await working
    except asyncio.CancelledError:
        scope.cancel()
        raise
    except InputError as error:
        # The traceback's frames would keep the client's texts in memory until the next garbage
        # collection.
        error.__context__ = error.__cause__ = None
        raise error.with_traceback(None) from None
