"""GrammarCompiler: decides when a grammar is compiled, and caches the results.

A grammar is first tried in a confined process (`trial.py`). Then a thread of this process compiles
it. Tenants share both fairly. Matchers are made in separate threads, so that they do not wait for
compilations. Only a grammar whose matcher takes about as long as a compilation uses those threads.

The verdict of a trial is cached. A timeout or a lost process is not: it may not happen again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from penstock.confined.errors import PoolClosed, PoolFull, TooMuchMemory, TooMuchTime, WorkerLost
from penstock.confined.pool import ConfinedPool, Job, Limits
from penstock.confined.scope import Cancellation
from penstock.protocol.errors import InputError, RequestFault
from penstock.protocol.structured import FIELD, StructuredOutputsParams
from penstock.structured.backend import Grammar, GrammarBackend, Tokenize, make_backend
from penstock.structured.fair_threads import FairThreads
from penstock.structured.trial import ENTRY, Refused, Setup, read_verdict
from penstock.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MEMORY_LIMIT = 2**30  # bytes for the trial of one grammar
MAX_WAITING = 256  # grammars that wait for a trial, and as many for compilation
NUM_COMPILERS = 2
NUM_MATCHER_THREADS = 2
QUICK_S = 0.05  # CPU time of a trial; up to this, matchers are made in the matcher threads
MAX_GRAMMARS = 128  # in the cache
MAX_MASK_THREADS = 8
CLOSED = "the engine is closed; no more grammars are compiled"

T = TypeVar("T")
ReadVocabulary = Callable[[], tuple[Vocabulary, Tokenize]]


class TryAgain(RequestFault):
    """A grammar could not be checked. It may be valid."""


class Compilation(Cancellation):
    """A grammar that is being compiled, shared by all requests for it. `future` gets the result."""

    def __init__(self, kind: str, tenant: str) -> None:
        super().__init__()
        self.kind = kind
        self.tenant = tenant
        self.future: Future[Grammar] = Future()
        self.waiting_ids: set[str] = set()  # requests
        self.is_quick = False
        self.is_forgotten = False  # the next request tries again


class GrammarCompiler:
    """Call it from one thread. The work happens in other threads.

    `read_vocabulary` is called once, at the first grammar. It is None without a tokenizer.
    """

    def __init__(
        self, backend: str, timeout_s: float, read_vocabulary: ReadVocabulary | None
    ) -> None:
        self._name = backend
        self._read_vocabulary = read_vocabulary
        self._lock = threading.Lock()  # guards the lazy build of the backend
        self._built: tuple[GrammarBackend, Vocabulary] | None = None
        self.tokenize: Tokenize | None = None
        limits = Limits(cpu_s=timeout_s, memory_bytes=MEMORY_LIMIT, max_queued=MAX_WAITING)
        self._timeout_s = timeout_s
        self.pool = ConfinedPool(ENTRY, self._setup, limits)
        self._compilers = FairThreads(NUM_COMPILERS, MAX_WAITING, "grammar")
        self._matchers = ThreadPoolExecutor(NUM_MATCHER_THREADS, thread_name_prefix="matcher")
        self._compilations: OrderedDict[bytes, Compilation] = OrderedDict()

    def backend(self) -> tuple[GrammarBackend, Vocabulary]:
        """Return the backend. The first call builds it, which takes a fraction of a second."""
        with self._lock:
            if self._built is None:
                if self._read_vocabulary is None:
                    raise InputError(f"{FIELD} needs a tokenizer: drop skip_tokenizer_init", FIELD)
                vocabulary, self.tokenize = self._read_vocabulary()
                threads = min(MAX_MASK_THREADS, max(1, (os.cpu_count() or 1) // 2))
                self._built = (
                    make_backend(self._name, vocabulary, self.tokenize, threads), vocabulary
                )  # fmt: skip
            return self._built

    @property
    def built(self) -> tuple[GrammarBackend, Vocabulary]:
        """The backend, which must have been built."""
        assert self._built is not None
        return self._built

    def _setup(self) -> bytes:
        return msgspec.msgpack.encode(Setup(self._name, self.backend()[1]))

    def request(self, params: StructuredOutputsParams, request_id: str, tenant: str) -> Compilation:
        """Return the compilation of a grammar. Equal grammars share one."""
        shared = msgspec.structs.replace(
            params, reasoning_end=None, reasoning_start=None, field=FIELD
        )
        spec = msgspec.msgpack.encode(shared)
        key = hashlib.sha256(spec).digest()
        found = self._compilations.get(key)
        if found is None or found.is_forgotten:
            found = self._compilations[key] = Compilation(shared.kind, tenant)
            self._matchers.submit(self._try, found, spec)
            if len(self._compilations) > MAX_GRAMMARS:
                self._compilations.popitem(last=False)
        self._compilations.move_to_end(key)
        found.waiting_ids.add(request_id)
        return found

    def leave(self, request_id: str, compilation: Compilation) -> None:
        """A request stops waiting. When the last one leaves, the compilation is cancelled."""
        compilation.waiting_ids.discard(request_id)
        if compilation.waiting_ids or compilation.future.done():
            return
        compilation.is_forgotten = True
        compilation.cancel()

    def in_thread(
        self,
        compilation: Compilation | None,
        tenant: str,
        work: Callable[..., T],
        *arguments: Any,
    ) -> Future[T]:
        """Run work in a matcher thread, or in a compiler thread if its grammar is slow."""
        if compilation is None or compilation.is_quick:
            return self._matchers.submit(work, *arguments)
        return self._compilers.submit(tenant, work, *arguments)

    def close(self) -> None:
        """Stop the threads and processes. Safe to call twice."""
        self._matchers.shutdown(wait=False)  # queued work there is short
        self._compilers.close()
        self.pool.close()

    # -- in other threads

    def _try(self, compilation: Compilation, spec: bytes) -> None:
        try:
            self.backend()
            job = self.pool.submit(spec, compilation.tenant)
        except Exception as error:
            compilation.future.set_exception(error)
            return
        compilation.attach(job)
        job.future.add_done_callback(lambda _: self._on_tried(compilation, job))

    def _on_tried(self, compilation: Compilation, job: Job) -> None:
        if job.future.cancelled():
            return
        error = job.future.exception()
        if error is None:
            verdict = read_verdict(job.future.result())
            if isinstance(verdict, Refused):
                compilation.future.set_exception(InputError(verdict.error, verdict.field))
                return
            compilation.is_quick = job.cpu_s <= QUICK_S
            compiling = self._compilers.submit(
                compilation.tenant, self._compile, compilation, verdict.lowered
            )
            compilation.attach(compiling)
            compiling.add_done_callback(lambda _: self._on_compiled(compilation, compiling))
        else:
            compilation.is_forgotten = True
            compilation.future.set_exception(self._explain(error, compilation.kind))

    def _compile(self, compilation: Compilation, lowered: str) -> None:
        started = time.perf_counter()
        try:
            grammar = self.backend()[0].compile(lowered)
        except Exception as error:
            compilation.future.set_exception(error)
            return
        logger.debug("Compiled %s in %.3f s", compilation.kind, time.perf_counter() - started)
        compilation.future.set_result(grammar)

    def _on_compiled(self, compilation: Compilation, compiling: Future[None]) -> None:
        """Fail the compilation if the task itself failed, such as by a full queue."""
        if not compiling.cancelled() and (error := compiling.exception()) is not None:
            compilation.is_forgotten = True
            compilation.future.set_exception(self._explain(error, compilation.kind))

    def _explain(self, error: BaseException, kind: str) -> BaseException:
        """Convert the error of a trial without a verdict into the client's error."""
        what = f"{FIELD}.{kind}"
        match error:
            case TooMuchTime():
                return InputError(
                    f"{what} is too complex: it takes more than {self._timeout_s:g} s to compile",
                    FIELD,
                )
            case TooMuchMemory():
                return InputError(
                    f"{what} is too complex: compiling it takes more memory than the "
                    f"{MEMORY_LIMIT // 2**20} MiB that it may",
                    FIELD,
                )
            case PoolClosed():
                return RequestFault(CLOSED)
            case WorkerLost() | PoolFull():
                return TryAgain(f"{what} could not be checked: {error}")
        return error
