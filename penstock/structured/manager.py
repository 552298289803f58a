"""GrammarManager: owns the grammars of running requests: follows outputs and fills masks."""

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

# Maximum time for one request's mask. A slower request delays all others in the batch.
STEP_LIMIT_S = 0.25

Row = tuple[ScheduledRequest, OutputGrammar]


@dataclass
class _Pending:
    """What a request waits for: its compiled grammar, then its `OutputGrammar`."""

    compilation: Compilation | None  # None if it needs no grammar
    future: Future[Grammar] | Future[OutputGrammar]


class GrammarManager:
    """All grammars of an engine. Call it from one thread. Other threads compile and fill masks.

    It is the gate where requests wait for their grammars. `read_vocabulary` is called once, in
    another thread, at the first request for structured output. It is None without a tokenizer.
    """

    def __init__(
        self, backend: str, timeout_s: float, read_vocabulary: ReadVocabulary | None
    ) -> None:
        self.compiler = GrammarCompiler(backend, timeout_s, read_vocabulary)
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._pending: dict[str, _Pending] = {}  # by request id
        self._outputs: dict[str, OutputGrammar] = {}
        self._faults: dict[str, InputError] = {}
        self._bits: Bits = np.zeros((0, 0), dtype=np.int32)
        self._is_slow = False  # the last masks took too long: time the next ones one by one

    # -- compilation

    def poll(self, request: EngineRequest) -> GateStatus | GateFailed:
        """Whether a request's grammar is ready. The first call starts its compilation."""
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
        """Wait until a pending grammar is ready. Returns at once if none is pending."""
        if self._pending:
            futures: list[Future[Any]] = [each.future for each in self._pending.values()]
            wait(futures, timeout_s, return_when="FIRST_COMPLETED")

    def _begin_output(self, request: EngineRequest, grammar: Grammar | None) -> OutputGrammar:
        """Make the `OutputGrammar` of a request. Without a grammar its answer is free."""
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
        output.accept(request.output_token_ids)  # not empty for a replay
        return output

    # -- outputs

    def accept(self, request_id: str, token_ids: Sequence[int], drafts: list[int]) -> int | None:
        """Advance a request's grammar by its new tokens.

        Returns the number of tokens that complete the output, or None if it is not complete.
        `drafts` are the draft tokens proposed for the next step. Raises `RequestFault`, or
        `InputError` if the request itself is wrong.
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
        """Whether the mask allows a token that the grammar refuses.

        A mask omits bytes of forced text that the vocabulary cannot write.
        """
        assert output.matcher is not None
        backend, vocabulary = self.compiler.built
        bits = np.zeros((1, -(-len(vocabulary) // 32)), dtype=np.int32)
        backend.fill([output.matcher], bits)
        return bool(bits[0, token_id // 32] >> (token_id % 32) & 1)

    def is_complete(self, request_id: str) -> bool:
        """Whether the output is complete, so that no token may follow."""
        return self._outputs[request_id].is_complete

    def drop(self, request_id: str) -> None:
        """Forget a request. Unknown requests are ignored."""
        self._forget_pending(request_id)
        self._outputs.pop(request_id, None)
        self._faults.pop(request_id, None)

    def _forget_pending(self, request_id: str) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        if pending.compilation is None or pending.future is not pending.compilation.future:
            pending.future.cancel()  # has no effect if it is done
        if pending.compilation is not None:
            self.compiler.leave(request_id, pending.compilation)

    # -- masks

    def start_masks(self, plan: StepPlan) -> Future[StepMasks]:
        """Run `masks` in another thread."""
        return self._filler.submit(self.masks, plan)

    def masks(self, plan: StepPlan) -> StepMasks:
        """Fill the masks of the plan's requests. All tokens before them must have been accepted.

        The result is valid until the next call.
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
        """Fill all masks at once. If that was too slow, time the next ones one by one."""
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
            # Wall time alone would blame the request for a busy machine.
            after = time.perf_counter(), time.process_time()
            seconds = min(end - start for start, end in zip(before, after, strict=True))
            if seconds > STEP_LIMIT_S:
                self._faults[row.request_id] = InputError(
                    f"{output.field} is too complex: one token took {seconds:.2f} s, where "
                    f"{STEP_LIMIT_S} s are allowed; ask for something simpler",
                    output.field,
                )

    def _find_faults(self, rows: Sequence[Row], num_rows: Sequence[int], bits: Bits) -> None:
        """Record failed matchers and allow all tokens in their rows: these requests end anyway."""
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
        """Stop the threads and processes. Safe to call twice."""
        self._filler.shutdown(wait=False, cancel_futures=True)
        self.compiler.close()


def reasoning_of(
    request: EngineRequest, tokens: Sequence[bytes], opening: Sequence[int] = ()
) -> Reasoning | None:
    """Return the reasoning rules of a request, or None if its answer begins at once.

    `opening` are the tokens of `reasoning_start` if it is forced.
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
        return None
    return Reasoning(
        tokens,
        ends=tuple(end.encode() for end in ends),
        starts=tuple(start.encode() for start in starts),
        budget=None if thinking is None else request.sampling.thinking_token_budget,
        opening=tuple(opening),
        closing=() if thinking is None else tuple(thinking.closing_token_ids),
        closes_at_end=params is not None,
    )
