"""A step in the making: what is left of its budget, and the plan that comes of it."""

from __future__ import annotations

from penstock.protocol.step import NewRequest, RequestResult, ScheduledRequest, StepPlan
from penstock.scheduler.request import RequestState


class Step:
    """Collects rows until its budget is spent; kept until its result is in."""

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget  # tokens left
        self.rows: list[tuple[RequestState, ScheduledRequest]] = []
        self._new_requests: list[NewRequest] = []

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for _, row in self.rows)

    def add(
        self, state: RequestState, num_tokens: int, num_drafts: int, block_ids: list[list[int]]
    ) -> None:
        """Give a running request a share of the step."""
        samples = state.advance(self.step_id, num_tokens, num_drafts)
        row = ScheduledRequest(
            state.request_id, state.incarnation, num_tokens, samples, block_ids, num_drafts
        )
        self.rows.append((state, row))
        self.budget -= num_tokens

    def add_new(self, state: RequestState, num_tokens: int, block_ids: list[list[int]]) -> None:
        """The same for a request that the runner does not hold."""
        request = state.request
        self._new_requests.append(
            NewRequest(
                request_id=state.request_id,
                token_ids=list(state.token_ids),
                num_prompt_tokens=state.num_prompt_tokens,
                num_computed_tokens=state.num_computed_tokens,
                params=request.params,
                seed=request.seed,
                eos_token_ids=request.eos_token_ids,
                bad_words_token_ids=request.bad_words_token_ids,
                num_prompt_logprobs=state.num_prompt_logprobs,
            )
        )
        self.add(state, num_tokens, 0, block_ids)

    def plan(self, released_ids: list[str]) -> StepPlan:
        return StepPlan(
            step_id=self.step_id,
            scheduled=[row for _, row in self.rows],
            new_requests=self._new_requests,
            released_ids=released_ids,
            masked=any(row.samples and state.request.params.is_masked for state, row in self.rows),
        )


def why_malformed(planned: ScheduledRequest, result: RequestResult) -> str | None:
    """What is wrong with the number of tokens that came back, if anything."""
    num_tokens = len(result.token_ids)
    most = 1 + planned.num_drafts if planned.samples else 0
    if min(most, 1) <= num_tokens <= most:
        return None
    return f"the step brought {num_tokens} tokens where {min(most, 1)} to {most} were due"
