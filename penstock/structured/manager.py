"""GrammarManager: compiles what requests ask for, follows their outputs, fills their masks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.confined.errors import JobError
from penstock.protocol.errors import InputError, RequestFault
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import ScheduledRequest, StepMasks, StepPlan
from penstock.protocol.structured import FIELD
from penstock.scheduler.gates import PENDING, READY, GateFailed, GateStatus
from penstock.structured.backend import Bits, Grammar, GrammarBackend
from penstock.structured.compiler import Compilation, GrammarCompiler, ReadVocabulary, TryAgain
from penstock.structured.output import ALL_TOKENS, Misfit, OutputGrammar
from penstock.structured.reasoning import Reasoning

# What one request's mask may take. A request that takes longer holds up everybody else's tokens.
STEP_LIMIT_S = 0.25

Row = tuple[ScheduledRequest, OutputGrammar]


@dataclass
class _Pending:
    """What a request waits for: its grammar, then its place in it."""

    compilation: Compilation | None  # None: it needs no grammar
    future: Future[Grammar] | Future[OutputGrammar]


class GrammarManager:
    """All grammars of an engine. One thread drives it; compiling and masks happen in others.

    It is the gate at which requests wait for their grammars. `read_vocabulary` is called once, in
    another thread, when a request first asks for structured output; None: there is no tokenizer.
    """

    def __init__(
        self, backend: str, timeout_s: float, read_vocabulary: ReadVocabulary | None
    ) -> None:
        self.compiler = GrammarCompiler(backend, timeout_s, read_vocabulary)
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._pending: dict[str, _Pending] = {}  # by the request that waits
        self._outputs: dict[str, OutputGrammar] = {}
        self._faults: dict[str, InputError] = {}
        self._bits: Bits = np.zeros((0, 0), dtype=np.int32)
        self._is_slow = False  # the last masks took too long: time the next ones request by request

    # -- grammars are compiled

    def poll(self, request: EngineRequest) -> GateStatus | GateFailed:
        """Whether a request's grammar is there. Begins to compile it when it first asks."""
        if request.pools or not request.sampling.is_masked:
            return READY
        params = request.sampling.structured_outputs
        pending = self._pending.get(request.request_id)
        if pending is None:
            pending = self._pending[request.request_id] = self._begin(request)
        if not pending.future.done():
            return PENDING
        try:
            result = pending.future.result()
        except InputError as error:
            if error.field == "tools":
                return GateFailed(str(error), error.field)
            kind, field = (params.kind, params.field) if params is not None else ("", error.field)
            why = str(error).replace(f"{FIELD}.{kind}", str(field))
            return GateFailed(why.replace(FIELD, str(field)), field)
        except JobError as error:
            return GateFailed(f"no room for this request's grammar: {error}", can_retry=True)
        except RequestFault as error:
            return GateFailed(str(error), can_retry=isinstance(error, TryAgain))
        if not isinstance(result, OutputGrammar):
            pending.future = self.compiler.in_thread(
                pending.compilation, request.tenant, self._begin_output, request, result
            )
            return PENDING
        self._outputs[request.request_id] = result
        self._forget_pending(request.request_id)
        return READY

    def _begin(self, request: EngineRequest) -> _Pending:
        params = request.sampling.structured_outputs
        if params is None:  # it only limits its reasoning
            return _Pending(
                None,
                self.compiler.in_thread(None, request.tenant, self._begin_output, request, None),
            )
        compilation = self.compiler.request(params, request.request_id, request.tenant)
        return _Pending(compilation, compilation.future)

    def wait(self, timeout_s: float) -> None:
        """Wait until something that a request waits for is done, if there is anything."""
        if self._pending:
            futures: list[Future[Any]] = [each.future for each in self._pending.values()]
            wait(futures, timeout_s, return_when="FIRST_COMPLETED")

    def _begin_output(self, request: EngineRequest, grammar: Grammar | None) -> OutputGrammar:
        """Where a request's output stands to begin with; without a grammar, its answer is free."""
        _, vocabulary = self.compiler.backend()
        assert self.compiler.tokenize is not None
        params = request.sampling.structured_outputs
        start = None if params is None else params.reasoning_start
        start_id = None if start is None else vocabulary.token_id(start)
        opening = [] if start is None or start_id is not None else self.compiler.tokenize(start)
        output = OutputGrammar(
            None if grammar is None else grammar.matcher(),
            reasoning=reasoning_of(request, vocabulary.tokens, opening),
            start_id=start_id,
            field=FIELD if params is None else params.field,
            end_ids=vocabulary.end_ids,
        )
        output.accept(request.output_token_ids)  # of a replay
        return output

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
        assert output.matcher is not None
        backend, vocabulary = self.compiler.built
        bits = np.zeros((1, -(-len(vocabulary) // 32)), dtype=np.int32)
        backend.fill([output.matcher], bits)
        return bool(bits[0, token_id // 32] >> (token_id % 32) & 1)

    def is_complete(self, request_id: str) -> bool:
        """Whether nothing may follow what a request has by now."""
        return self._outputs[request_id].is_complete

    def drop(self, request_id: str) -> None:
        """Forget a request; one that is not here is ignored."""
        self._forget_pending(request_id)
        self._outputs.pop(request_id, None)
        self._faults.pop(request_id, None)

    def _forget_pending(self, request_id: str) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        if pending.compilation is None or pending.future is not pending.compilation.future:
            pending.future.cancel()  # nothing, if it is done
        if pending.compilation is not None:
            self.compiler.leave(request_id, pending.compilation)

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
        backend, vocabulary = self.compiler.built
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

    def _fill(self, backend: GrammarBackend, rows: Sequence[Row], bits: Bits) -> None:
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
            before = time.perf_counter(), time.process_time()
            assert output.matcher is not None
            backend.fill([output.matcher], bits[index : index + 1])
            # Not wall time alone: on a busy machine, it is others who take it.
            after = time.perf_counter(), time.process_time()
            seconds = min(end - start for start, end in zip(before, after, strict=True))
            if seconds > STEP_LIMIT_S:
                self._faults[row.request_id] = InputError(
                    f"{output.field} is too complex: one token took {seconds:.2f} s, where "
                    f"{STEP_LIMIT_S} s are allowed; ask for something simpler",
                    output.field,
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
        self._filler.shutdown(wait=False, cancel_futures=True)
        self.compiler.close()


def reasoning_of(
    request: EngineRequest, tokens: Sequence[bytes], opening: Sequence[int] = ()
) -> Reasoning | None:
    """What comes before the answer of a request, if it says anything about that.

    `opening` are the tokens of `reasoning_start`, where it is forced.
    """
    params, thinking = request.sampling.structured_outputs, request.thinking
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
        budget=None if thinking is None else request.sampling.thinking_token_budget,
        opening=tuple(opening),
        closing=() if thinking is None else tuple(thinking.closing_token_ids),
        closes_at_end=params is not None,
    )
