"""PlannedStep: owns one step while it is planned, and matches its results to its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.protocol.step import (
    NO_SLOT,
    Job,
    NewRequest,
    RequestResult,
    ScheduledRequest,
    StepPlan,
)
from penstock.scheduler.request import RequestState


class PlannedStep:
    """Collects rows until the token budget is spent. Kept until the step's result arrives."""

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget  # tokens left
        self.states: list[RequestState] = []
        self.jobs: list[Job] = []
        self.num_drafts = 0  # to propose after the step
        self.least_chance = 0.0  # see StepPlan
        self.without_drafts = True  # no drafts are proposed after it, nor verified in it
        self.ends_probe = False  # it verifies drafts that are tried although they do not pay
        self.is_decode = True  # every request samples, and computes only drafts besides
        self.started_at = 0.0
        self._rows: list[ScheduledRequest] = []  # one per state, sent to the runner
        self._planned: list[ScheduledRequest] = []  # same rows, but `decode_row` for plain decodes
        self._ids: list[str] = []
        self._new_requests: list[NewRequest] = []
        self._is_masked = False

    def repeat(self, state: RequestState) -> None:
        """Schedule a plain decode step again. Nothing but the counts changes."""
        assert state.decode_row is not None
        self.states.append(state)
        self._rows.append(state.decode_row)
        self._planned.append(state.decode_row)
        self._ids.append(state.request_id)
        state.last_step_id = self.step_id
        state.num_computed_tokens += 1
        state.num_placeholders += 1
        state.num_drafts = self.num_drafts if state.speculates else 0
        self.budget -= 1

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self._rows)

    def add(
        self, state: RequestState, num_tokens: int, num_drafts: int, block_ids: list[list[int]]
    ) -> None:
        """Schedule a request that the runner already holds."""
        samples = state.advance(self.step_id, num_tokens, num_drafts)
        if samples and state.speculates:
            state.num_drafts = self.num_drafts
        self.is_decode = self.is_decode and samples and num_tokens == 1 + num_drafts
        row = ScheduledRequest(
            state.request_id, state.incarnation, num_tokens, samples, block_ids, num_drafts
        )
        self.states.append(state)
        self._rows.append(row)
        decodes = samples and num_tokens == 1
        self._planned.append((state.decode_row or row) if decodes else row)
        self._ids.append(state.request_id)
        self._is_masked = self._is_masked or (samples and state.is_masked)
        self.budget -= num_tokens

    def add_new(
        self,
        state: RequestState,
        num_tokens: int,
        block_ids: list[list[int]],
        adapter_slot: int = NO_SLOT,
    ) -> None:
        """Schedule a request that the runner does not hold yet."""
        request = state.request
        has_output = len(state.token_ids) > state.num_prompt_tokens
        self._new_requests.append(
            NewRequest(
                request_id=state.request_id,
                token_ids=list(state.token_ids) if has_output else request.prompt_token_ids,
                num_prompt_tokens=state.num_prompt_tokens,
                num_computed_tokens=state.num_computed_tokens,
                params=request.params,
                seed=request.seed,
                eos_token_ids=request.eos_token_ids,
                bad_words_token_ids=request.bad_words_token_ids,
                num_prompt_logprobs=state.num_prompt_logprobs,
                num_unpooled=request.num_unpooled,
                second_segment=request.second_segment,
                cache_salt=state.cache_salt,
                adapter_slot=adapter_slot,
                media=state.media,
                spans=state.spans,
            )
        )
        self.add(state, num_tokens, 0, block_ids)

    def plan(self, released_ids: list[str]) -> StepPlan:
        return StepPlan(
            step_id=self.step_id,
            scheduled=self._rows,
            new_requests=self._new_requests,
            jobs=self.jobs,
            released_ids=released_ids,
            masked=self._is_masked,
            num_drafts=self.num_drafts,
            least_chance=self.least_chance,
        )

    def match(
        self, results: Sequence[RequestResult]
    ) -> Iterator[tuple[RequestState, ScheduledRequest, RequestResult]]:
        """Pair every row with its result. A missing result counts as an empty one."""
        if [result.request_id for result in results] != self._ids:  # decodes may come first
            by_id = {result.request_id: result for result in results}
            results = [
                by_id.get(row.request_id)
                or RequestResult(request_id=row.request_id, incarnation=row.incarnation)
                for row in self._rows
            ]
        return zip(self.states, self._planned, results, strict=True)
