"""After a step that failed: which requests must first run alone, and how large steps may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from penstock.protocol.limits import StepLimits
from penstock.scheduler.plan import PlannedStep
from penstock.scheduler.policy import Policy, WaitingQueue
from penstock.scheduler.request import RequestState

STEPS_UNTIL_LARGER = 64  # that must go well before steps may have twice as many tokens again


class StepRetries:
    """Finds the request that makes steps fail, and the size of steps that memory suffices for.

    Suspects are those of a step that failed. Each is run alone until it gets a token; one for
    which that fails, too, is the culprit. Suspects are neither waiting nor running meanwhile.
    """

    def __init__(self, policy: Policy, limits: StepLimits) -> None:
        self._policy = policy
        self._suspects: deque[RequestState] = deque()
        self._can_shrink = limits.enable_chunked_prefill
        self._max_num_tokens = limits.max_num_batched_tokens
        self._num_good_steps = 0
        self.num_tokens = limits.max_num_batched_tokens  # that a step may have now

    def __len__(self) -> int:
        return len(self._suspects)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._suspects)

    @property
    def on_trial(self) -> RequestState | None:
        """Who runs next, or runs already, with nobody beside it."""
        return self._suspects[0] if self._suspects else None

    def __contains__(self, state: RequestState) -> bool:
        return state in self._suspects

    def take_in(
        self, step: PlannedStep, failed: Sequence[RequestState], out_of_memory: bool
    ) -> str | None:
        """A step failed for these requests. How they are to be run from now on is noted here.

        When memory ran out that is in smaller steps, after anything else one by one. What is
        wrong with the step's only request, if that has failed already, or is of no use; else None.
        """
        is_alone = len(step.states) == 1
        if not out_of_memory:
            if is_alone:
                return "the engine failed to run this request"
            self._suspects.extend(failed)
        elif self._can_shrink and (step.num_tokens > 1 or not is_alone):
            self._shrink(step.num_tokens)
        elif is_alone:
            return "there is not enough memory to run this request, with nothing else beside it"
        else:
            self._suspects.extend(failed)
        return None

    def acquit(self, state: RequestState) -> None:
        """It has got its token, or is over; one that is no suspect is ignored."""
        if state in self._suspects:
            self._suspects.remove(state)

    def queue(self) -> WaitingQueue:
        """The one on trial, as if nobody else waited."""
        queue = WaitingQueue(self._policy)
        if self._suspects:
            queue.put_back(self._suspects[0])
        return queue

    def _shrink(self, num_tokens: int) -> None:
        """A step with so many tokens did not fit into memory: the next have half of them."""
        self.num_tokens = max(num_tokens // 2, 1)
        self._num_good_steps = 0

    def count_good_step(self) -> None:
        """Let steps grow again, in time: whatever took the memory may be gone."""
        if self.num_tokens == self._max_num_tokens:
            return
        self._num_good_steps += 1
        if self._num_good_steps == STEPS_UNTIL_LARGER:
            self._num_good_steps = 0
            self.num_tokens = min(2 * self.num_tokens, self._max_num_tokens)
