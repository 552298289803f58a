"""StepRetries: decides after a failed step which requests run alone and how large steps may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from penstock.protocol.limits import StepLimits
from penstock.scheduler.plan import PlannedStep
from penstock.scheduler.policy import Policy, WaitingQueue
from penstock.scheduler.request import RequestState

STEPS_UNTIL_LARGER = 64  # successful steps before the token limit doubles again


class StepRetries:
    """Finds the request that makes steps fail, and a step size that fits into memory.

    The requests of a failed step are suspects. Each suspect runs alone until it gets a token. If
    it fails again, it is the culprit. Until then suspects are kept out of the waiting queue.
    """

    def __init__(self, policy: Policy, limits: StepLimits) -> None:
        self._policy = policy
        self._suspects: deque[RequestState] = deque()
        self._can_shrink = limits.enable_chunked_prefill
        self._max_num_tokens = limits.max_num_batched_tokens
        self._min_num_tokens = max(limits.max_span, 1)  # a span cannot be cut
        self._num_good_steps = 0
        self.num_tokens = limits.max_num_batched_tokens  # current limit per step

    def __len__(self) -> int:
        return len(self._suspects)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._suspects)

    @property
    def on_trial(self) -> RequestState | None:
        """The suspect that runs alone now or next."""
        return self._suspects[0] if self._suspects else None

    def __contains__(self, state: RequestState) -> bool:
        return state in self._suspects

    def take_in(
        self, step: PlannedStep, failed: Sequence[RequestState], out_of_memory: bool
    ) -> str | None:
        """Record a failed step and decide how its requests are retried.

        After an out-of-memory error the next steps are smaller, where that is possible. Otherwise
        the requests become suspects. Returns an error text if the step held a single request and
        a retry would not help, else None.
        """
        is_alone = len(step.states) == 1
        if not out_of_memory:
            if is_alone:
                return "the engine failed to run this request"
            self._suspects.extend(failed)
        elif self._can_shrink and step.num_tokens > self._min_num_tokens:
            self._shrink(step.num_tokens)
        elif is_alone:
            return "there is not enough memory to run this request, with nothing else beside it"
        else:
            self._suspects.extend(failed)
        return None

    def acquit(self, state: RequestState) -> None:
        """Clear a suspect that got its token or ended. Other requests are ignored."""
        if state in self._suspects:
            self._suspects.remove(state)

    def queue(self) -> WaitingQueue:
        """A queue that holds only the suspect on trial."""
        queue = WaitingQueue(self._policy)
        if self._suspects:
            queue.put_back(self._suspects[0])
        return queue

    def _shrink(self, num_tokens: int) -> None:
        """Halve the token limit: a step with `num_tokens` tokens ran out of memory."""
        self.num_tokens = max(num_tokens // 2, self._min_num_tokens)
        self._num_good_steps = 0

    def count_good_step(self) -> None:
        """Raise the token limit again in time: memory may have been freed."""
        if self.num_tokens == self._max_num_tokens:
            return
        self._num_good_steps += 1
        if self._num_good_steps == STEPS_UNTIL_LARGER:
            self._num_good_steps = 0
            self.num_tokens = min(2 * self.num_tokens, self._max_num_tokens)
