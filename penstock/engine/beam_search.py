"""Beam search over one-token requests. Chooses the sequences that transformers chooses."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

import msgspec

from penstock.engine.observer import RequestRecord
from penstock.protocol.beam_search import BeamSearchParams, BeamSearchSequence
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import PenstockError, RequestFault
from penstock.protocol.outputs import LogprobsAtPosition, RequestOutput
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import OutputKind, SamplingParams
from penstock.text.frontend import PreparedRequest
from penstock.text.output import OutputAssembler


class BeamSearch:
    """The beams of one prompt.

    The caller runs `requests` and hands their outputs to `advance`, until there are none.
    `completions` are what the client asked for: one for each sequence to return. The first has the
    prompt and its adapter. Its `max_tokens` is the limit.
    """

    def __init__(self, completions: Sequence[EngineRequest], params: BeamSearchParams) -> None:
        request = completions[0]
        assert request.sampling.max_tokens is not None
        self._completions = completions
        self._request = request
        self._params = params
        self._max_tokens = request.sampling.max_tokens
        ignores_eos = params.ignore_eos or request.sampling.ignore_eos
        self._ends = set() if ignores_eos else set(request.eos_token_ids)
        self._num_tokens = 0  # of each running sequence, after the prompt
        self._finished: list[tuple[float, BeamSearchSequence]] = []  # the best ones, with scores
        self.running = [BeamSearchSequence(list(request.prompt_token_ids))]
        self._began_at: float | None = None  # the first step
        self._first: RequestOutput | None = None  # of the first step
        self._last_token_at: float | None = None

    def requests(self, ids: Iterator[str]) -> list[PreparedRequest]:
        """One request for the next token of each running sequence."""
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=self.num_candidates,
            ignore_eos=True,
            detokenize=False,
            output_kind=OutputKind.FINAL_ONLY,
        )
        if self._began_at is None:
            self._began_at = time.monotonic()
        prepared = []
        for beam in self.running:
            own = msgspec.structs.replace(
                self._request,
                request_id=next(ids),
                prompt_token_ids=beam.tokens,
                params=params,
                is_search_step=True,
            )
            assembler = OutputAssembler(
                own.request_id, None, beam.tokens, params, None, [own.request_id]
            )
            prepared.append(PreparedRequest(own.request_id, [own], assembler))
        return prepared

    @property
    def num_candidates(self) -> int:
        """How many next tokens of each sequence to offer.

        Enough sequences continue even if every one of them could also end.
        """
        return max(2, 1 + len(self._ends)) * self._params.beam_width

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Choose the next beams from the outputs of `requests`."""
        offered = []
        for output in outputs:
            if output.error is not None:
                raise RequestFault(f"beam search failed: {output.error}")
            assert output.outputs[0].logprobs is not None
            offered.append(output.outputs[0].logprobs[0])
        self._first = self._first or outputs[0]
        self._last_token_at = time.monotonic()
        self._choose(offered)

    def _choose(self, offered: Sequence[LogprobsAtPosition]) -> None:
        """Choose the next beams. `offered` has the likeliest next tokens of each running one."""
        width = self._params.beam_width
        candidates = sorted(
            (
                (beam.cum_logprob + entry.logprob, token_id, beam, logprobs)
                for beam, logprobs in zip(self.running, offered, strict=True)
                for token_id, entry in logprobs.items()
            ),
            key=lambda candidate: -candidate[0],
        )
        self._num_tokens += 1
        self.running = []
        for rank, (total, token_id, beam, logprobs) in enumerate(candidates[: self.num_candidates]):
            ended = token_id in self._ends
            if not ended and self._num_tokens < self._max_tokens:
                if len(self.running) < width:
                    self.running.append(_extend(beam, token_id, total, logprobs))
            elif rank < width:
                sequence = _extend(beam, token_id, total, logprobs)
                sequence.finish_reason = "stop" if ended else "length"
                if ended:
                    sequence.stop_reason = token_id
                    if not self._params.include_stop_str_in_output:
                        sequence.tokens.pop()
                self._finished.append((self._score(total), sequence))
        self._finished.sort(key=lambda item: -item[0])
        del self._finished[width:]
        if self.running and not self._can_improve():
            self.running = []

    def _can_improve(self) -> bool:
        """Whether a running sequence can still be among the best, as far as one can tell."""
        if len(self._finished) < self._params.beam_width:
            return True
        return self._score(self.running[0].cum_logprob) > self._finished[-1][0]

    def _score(self, total: float) -> float:
        divisor: float = self._num_tokens**self._params.length_penalty
        return total / divisor

    def best(self) -> list[BeamSearchSequence]:
        """The finished sequences, the best one first."""
        return [sequence for _, sequence in self._finished]

    def records(self, reason: FinishReason) -> list[RequestRecord]:
        """The completions as observers see them. `reason` is why the search ended unfinished."""
        if self._began_at is None:
            return []
        records = [RequestRecord(each, submitted_at=self._began_at) for each in self._completions]
        for record in records:
            record.finished_at, record.finish_reason = time.monotonic(), reason
            if self._first is not None and self._first.metrics is not None:
                times = self._first.metrics
                record.num_cached_tokens = self._first.num_cached_tokens
                record.prefill_s = times.first_token_ts - times.scheduled_ts
                record.first_token_at = times.first_token_ts
                record.last_token_at = self._last_token_at
        if not self.running:
            num_prompt_tokens = len(self._request.prompt_token_ids)
            for record, sequence in zip(records, self.best(), strict=True):
                record.token_ids = sequence.tokens[num_prompt_tokens:]
                record.finished_at = self._last_token_at
                record.finish_reason = FinishReason(sequence.finish_reason)
        return records


@contextlib.contextmanager
def reporting(
    searches: Sequence[BeamSearch], report: Callable[[list[RequestRecord]], None]
) -> Iterator[None]:
    """Report the searches' completions when they have ended, for whatever reason."""
    reason = FinishReason.ABORT
    try:
        yield
    except PenstockError:
        reason = FinishReason.ERROR
        raise
    finally:
        report([record for search in searches for record in search.records(reason)])


def _extend(
    beam: BeamSearchSequence, token_id: int, total: float, logprobs: LogprobsAtPosition
) -> BeamSearchSequence:
    return dataclasses.replace(
        beam,
        tokens=[*beam.tokens, token_id],
        cum_logprob=total,
        logprobs=[*beam.logprobs, logprobs],
    )


async def beam_outputs(
    requests: Sequence[PreparedRequest],
    run: Callable[[Sequence[PreparedRequest]], AsyncGenerator[tuple[int, RequestOutput], None]],
    ids: Iterator[str],
    report: Callable[[list[RequestRecord]], None],
) -> list[RequestOutput]:
    """The outputs of requests with `beams`. Each of their completions is a sequence found.

    `run` streams the outputs of a step's requests, each with its index. `report` is told of the
    completions when all have ended.
    """
    searches = []
    for request in requests:
        assert request.beams is not None
        searches.append(BeamSearch(request.children, request.beams))
    with reporting(searches, report):
        while running := [search for search in searches if search.running]:
            steps = [search.requests(ids) for search in running]
            outputs: dict[int, RequestOutput] = {}
            async with contextlib.aclosing(run([one for step in steps for one in step])) as results:
                async for index, output in results:
                    outputs[index] = output
            in_order = iter([outputs[index] for index in range(len(outputs))])
            for search, step in zip(running, steps, strict=True):
                search.advance([next(in_order) for _ in step])
    found = []
    for request, search in zip(requests, searches, strict=True):
        num_prompt_tokens = len(request.children[0].prompt_token_ids)
        for child, sequence in zip(request.children, search.best(), strict=True):
            request.assembler.add(
                EngineDelta(
                    request_id=child.request_id,
                    token_ids=sequence.tokens[num_prompt_tokens:],
                    finish_reason=FinishReason(sequence.finish_reason),
                )
            )
        whole = request.assembler.take()
        assert whole is not None
        found.append(whole)
    return found
