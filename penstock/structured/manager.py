"""GrammarManager: compiles what requests ask for, follows their outputs, fills their masks."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec
import numpy as np

from penstock.protocol.errors import InputError, RequestFault
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import ScheduledRequest, StepMasks, StepPlan
from penstock.protocol.structured import FIELD, StructuredOutputsParams
from penstock.scheduler.gates import PENDING, READY, Failed, GateStatus
from penstock.structured.backend import Backend, Bits, Grammar, Tokenize, make_backend
from penstock.structured.checker import Checker
from penstock.structured.output import ALL_TOKENS, Misfit, OutputGrammar
from penstock.structured.reasoning import Reasoning
from penstock.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

NUM_COMPILERS = 2  # a grammar that takes long does not keep all others waiting
MAX_GRAMMARS = 128  # that are kept for the next request which asks for the same
MAX_MASK_THREADS = 8
# What one request's mask may take. A request that takes longer holds up everybody else's tokens.
STEP_LIMIT_S = 0.25

Row = tuple[ScheduledRequest, OutputGrammar]
ReadVocabulary = Callable[[], tuple[Vocabulary, Tokenize]]


class GrammarManager:
    """All grammars of an engine. One thread drives it; compiling and masks happen in others.

    It is the gate at which requests wait for their grammars. `read_vocabulary` is called once, in
    another thread, when a request first asks for structured output; None: there is no tokenizer.
    """

    def __init__(
        self, backend: str, timeout_s: float, read_vocabulary: ReadVocabulary | None
    ) -> None:
        self._name = backend
        self._timeout_s = timeout_s
        self._read_vocabulary = read_vocabulary
        self._lock = threading.Lock()  # of what is built when it is first needed
        self._built: tuple[Backend, Vocabulary] | None = None
        self._tokenize: Tokenize | None = None
        self._idle_checkers: queue.SimpleQueue[Checker] = queue.SimpleQueue()
        self._checkers: list[Checker] = []
        self._is_closed = False
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammar")
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._grammars: OrderedDict[bytes, Future[Grammar | None]] = OrderedDict()
        # By the request that waits: its grammar (None: it needs none), then its place in it.
        self._pending: dict[str, Future[Grammar | None] | Future[OutputGrammar]] = {}
        self._outputs: dict[str, OutputGrammar] = {}
        self._faults: dict[str, InputError | RequestFault] = {}
        self._bits: Bits = np.zeros((0, 0), dtype=np.int32)
        self._is_slow = False  # the last masks took too long: time the next ones request by request

    # -- grammars are compiled

    def poll(self, request: EngineRequest) -> GateStatus | Failed:
        """Whether a request's grammar is there. Begins to compile it when it first asks."""
        if not request.params.is_masked:
            return READY
        params = request.params.structured_outputs
        future = self._pending.get(request.request_id)
        if future is None:
            future = self._pending[request.request_id] = self._grammar(params)
        if not future.done():
            return PENDING
        try:
            result = future.result()
        except InputError as error:
            if error.field == "tools":
                return Failed(str(error), error.field)
            kind, field = (params.kind, params.field) if params is not None else ("", error.field)
            why = str(error).replace(f"{FIELD}.{kind}", str(field))
            return Failed(why.replace(FIELD, str(field)), field)
        except RequestFault as error:
            return Failed(str(error))
        if not isinstance(result, OutputGrammar):
            self._pending[request.request_id] = self._compilers.submit(self._begin, request, result)
            return PENDING
        self._outputs[request.request_id] = result
        del self._pending[request.request_id]
        return READY

    def wait(self, timeout_s: float) -> None:
        """Wait until something that a request waits for is done, if there is anything."""
        if self._pending:
            futures: list[Future[Any]] = list(self._pending.values())
            wait(futures, timeout_s, return_when="FIRST_COMPLETED")

    def _begin(self, request: EngineRequest, grammar: Grammar | None) -> OutputGrammar:
        """Where a request's output stands to begin with; without a grammar, its answer is free."""
        _, vocabulary = self._backend()
        assert self._tokenize is not None
        params = request.params.structured_outputs
        start = None if params is None else params.reasoning_start
        start_id = None if start is None else vocabulary.token_id(start)
        opening = [] if start is None or start_id is not None else self._tokenize(start)
        output = OutputGrammar(
            None if grammar is None else grammar.matcher(),
            reasoning=reasoning_of(request, vocabulary.tokens, opening),
            start_id=start_id,
            field=FIELD if params is None else params.field,
        )
        output.accept(request.output_token_ids)  # of a replay
        return output

    def _grammar(self, params: StructuredOutputsParams | None) -> Future[Grammar | None]:
        """Compiled, being compiled or queued for it; the same for all who ask the same."""
        if params is None:
            return self._compilers.submit(self._no_grammar)
        shared = msgspec.structs.replace(
            params, reasoning_end=None, reasoning_start=None, field=FIELD
        )
        key = hashlib.sha256(msgspec.msgpack.encode(shared)).digest()
        future = self._grammars.get(key)
        if future is None:
            future = self._grammars[key] = self._compilers.submit(self._compile, shared)
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(key)
        return future

    def _no_grammar(self) -> None:
        """What a request needs that only limits its reasoning: the vocabulary."""
        self._backend()

    def _compile(self, params: StructuredOutputsParams) -> Grammar | None:
        started = time.perf_counter()
        backend, vocabulary = self._backend()
        checker = self._take_checker(vocabulary)
        try:
            lowered = checker.check(params)
        finally:
            self._idle_checkers.put(checker)
        grammar = backend.compile(lowered)
        logger.debug("Compiled %s in %.3f s", params.kind, time.perf_counter() - started)
        return grammar

    def _backend(self) -> tuple[Backend, Vocabulary]:
        with self._lock:
            if self._built is None:
                if self._read_vocabulary is None:
                    raise InputError(f"{FIELD} needs a tokenizer: drop skip_tokenizer_init", FIELD)
                vocabulary, self._tokenize = self._read_vocabulary()
                threads = min(MAX_MASK_THREADS, max(1, (os.cpu_count() or 1) // 2))
                self._built = (
                    make_backend(self._name, vocabulary, self._tokenize, threads), vocabulary
                )  # fmt: skip
            return self._built

    def _take_checker(self, vocabulary: Vocabulary) -> Checker:
        try:
            return self._idle_checkers.get_nowait()
        except queue.Empty:
            checker = Checker(self._name, vocabulary, self._timeout_s)
            self._checkers.append(checker)
            if self._is_closed:  # perhaps too late for `close` to see it
                checker.end()
            return checker

    # -- outputs are followed

    def accept(self, request_id: str, token_ids: Sequence[int], drafts: list[int]) -> int | None:
        """Tokens came for a request: with how many of them its output is complete; None: not yet.

        `drafts` are proposed to come next. Raises `RequestFault`, or `InputError` if the client is
        to blame.
        """
        if request_id in self._faults:
            raise self._faults[request_id]
        output = self._outputs[request_id]
        output.drafts = drafts
        try:
            return output.accept(token_ids)
        except Misfit as misfit:
            if not self._was_allowed(output, misfit.token_id):
                raise
            raise InputError(
                f"{output.field} asks for a text that this model cannot write: its vocabulary "
                "lacks a byte of it",
                output.field,
            ) from misfit

    def _was_allowed(self, output: OutputGrammar, token_id: int) -> bool:
        """Whether a mask has this token that the grammar refuses: it leaves out what cannot be
        written of the text that has to come."""
        assert self._built is not None
        assert output.matcher is not None
        backend, vocabulary = self._built
        bits = np.zeros((1, -(-len(vocabulary) // 32)), dtype=np.int32)
        backend.fill([output.matcher], bits)
        return bool(bits[0, token_id // 32] >> (token_id % 32) & 1)

    def is_complete(self, request_id: str) -> bool:
        """Whether nothing may follow what a request has by now."""
        return self._outputs[request_id].is_complete

    def drop(self, request_id: str) -> None:
        """Forget a request; one that is not here is ignored."""
        self._pending.pop(request_id, None)
        self._outputs.pop(request_id, None)
        self._faults.pop(request_id, None)

    # -- masks are filled

    def start_masks(self, plan: StepPlan) -> Future[StepMasks]:
        """`masks` in another thread, while this one computes."""
        return self._filler.submit(self.masks, plan)

    def masks(self, plan: StepPlan) -> StepMasks:
        """What the plan's requests may sample. All tokens before them have been accepted.

        Good until the next call.
        """
        constrained = [
            (row, output)
            for row in plan.scheduled
            if row.samples and (output := self._outputs.get(row.request_id)) is not None
        ]
        undrafted = [pair for pair in constrained if pair[0].num_drafts == 0]
        plain = [pair for pair in undrafted if pair[1].is_answer]
        drafting = [pair for pair in constrained if pair[0].num_drafts]
        drafting += [pair for pair in undrafted if not pair[1].is_answer and not pair[1].is_free]
        num_rows = [1] * len(plain) + [1 + row.num_drafts for row, _ in drafting]
        if not num_rows:
            return StepMasks(request_ids=[], num_rows=[], bits=memoryview(b""))
        assert self._built is not None
        backend, vocabulary = self._built
        bits = self._reserve(sum(num_rows), -(-len(vocabulary) // 32))
        self._fill(backend, plain, bits[: len(plain)])
        start = len(plain)
        for row, output in drafting:
            output.fill_with_drafts(backend, bits[start : start + 1 + row.num_drafts])
            start += 1 + row.num_drafts
        self._find_faults([*plain, *drafting], num_rows, bits)
        return StepMasks(
            request_ids=[row.request_id for row, _ in (*plain, *drafting)],
            num_rows=num_rows,
            bits=bits.data.cast("B"),
        )

    def _fill(self, backend: Backend, rows: Sequence[Row], bits: Bits) -> None:
        """All at once. After it took too long, the next time one by one, to see who it is."""
        if not rows:
            return
        started = time.perf_counter()
        if not self._is_slow:
            backend.fill([output.matcher for _, output in rows if output.matcher], bits)
            self._is_slow = time.perf_counter() - started > STEP_LIMIT_S
            return
        self._is_slow = False
        for index, (row, output) in enumerate(rows):
            before = time.perf_counter()
            assert output.matcher is not None
            backend.fill([output.matcher], bits[index : index + 1])
            seconds = time.perf_counter() - before
            if seconds > STEP_LIMIT_S:
                self._faults[row.request_id] = RequestFault(
                    f"{output.field} is too complex: one token took {seconds:.2f} s, where "
                    f"{STEP_LIMIT_S} s are allowed"
                )

    def _find_faults(self, rows: Sequence[Row], num_rows: Sequence[int], bits: Bits) -> None:
        """Remember whose matcher failed, and leave its rows free: the request ends anyhow."""
        start = 0
        for (row, output), count in zip(rows, num_rows, strict=True):
            if (fault := output.fault) is not None:
                self._faults[row.request_id] = fault
                bits[start : start + count] = ALL_TOKENS
            start += count

    def _reserve(self, num_rows: int, num_words: int) -> Bits:
        if self._bits.shape[0] < num_rows or self._bits.shape[1] != num_words:
            self._bits = np.full((num_rows, num_words), ALL_TOKENS, dtype=np.int32)
        return self._bits[:num_rows]

    def close(self) -> None:
        """End what runs elsewhere. Safe to call twice."""
        self._is_closed = True
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._filler.shutdown(wait=False, cancel_futures=True)
        for checker in list(self._checkers):
            checker.end()


def reasoning_of(
    request: EngineRequest, tokens: Sequence[bytes], opening: Sequence[int] = ()
) -> Reasoning | None:
    """What comes before the answer of a request, if it says anything about that.

    `opening` are the tokens of `reasoning_start`, where it is forced.
    """
    params, thinking = request.params.structured_outputs, request.thinking
    starts: list[str] = []
    if params is not None:
        ends = params.reasoning_ends
        if params.reasoning_start is not None and not opening:
            starts = [params.reasoning_start]
    elif thinking is not None:
        ends, starts = thinking.ends, [] if thinking.is_open else thinking.starts
    else:
        ends = []
    if not ends:
        return None  # the answer begins at once
    return Reasoning(
        tokens,
        ends=tuple(end.encode() for end in ends),
        starts=tuple(start.encode() for start in starts),
        budget=None if thinking is None else request.params.thinking_token_budget,
        opening=tuple(opening),
        closing=() if thinking is None else tuple(thinking.closing_token_ids),
        closes_at_end=params is not None,
    )
