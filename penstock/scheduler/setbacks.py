"""After a step that failed: which requests must first run alone, and how large steps may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from penstock.scheduler.policy import Policy, WaitingQueue
from penstock.scheduler.request import RequestState

STEPS_UNTIL_LARGER = 64  # that must go well before steps may have twice as many tokens again


class Setbacks:
    """Finds the request that makes steps fail, and the size of steps that memory suffices for.

    Suspects are those of a step that failed. Each is run alone until it gets a token; one for
    which that fails, too, is the culprit. Suspects are neither waiting nor running meanwhile.
    """

    def __init__(self, policy: Policy, max_num_batched_tokens: int) -> None:
        self._policy = policy
        self._suspects: deque[RequestState] = deque()
        self._max_num_tokens = max_num_batched_tokens
        self._num_good_steps = 0
        self.num_tokens = max_num_batched_tokens  # that a step may have now

    def __len__(self) -> int:
        return len(self._suspects)

    @property
    def on_trial(self) -> RequestState | None:
        """Who runs next, or runs already, with nobody beside it."""
        return self._suspects[0] if self._suspects else None

    def __contains__(self, state: RequestState) -> bool:
        return state in self._suspects

    def accuse(self, states: Iterable[RequestState]) -> None:
        """Add the requests of a step that failed, which is no trial."""
        self._suspects.extend(states)

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

    def shrink(self, num_tokens: int) -> None:
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
