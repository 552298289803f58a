"""Speculation: decides how many draft tokens each request brings to a step."""

from __future__ import annotations

from penstock.protocol.limits import StepLimits
from penstock.protocol.step import RequestResult, ScheduledRequest
from penstock.scheduler.request import RequestState


class Speculation:
    """Drafts are proposed at the end of a step and verified in the next one.

    The output does not depend on the number of drafts. Therefore it may depend on anything, such
    as the load.
    """

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits

    @property
    def is_enabled(self) -> bool:
        return self._limits.num_drafts > 0

    def num_to_propose(self, num_running: int) -> int:
        """How many drafts the drafter proposes after the step that is being planned.

        0: the drafter does not run, and the next step pays nothing for speculation.
        """
        return self._limits.num_drafts

    def num_to_verify(self, state: RequestState) -> int:
        """How many of its proposed drafts the request brings to the step."""
        return state.num_drafts

    def record(self, state: RequestState, planned: ScheduledRequest, result: RequestResult) -> None:
        """Learn from a verified step, and note how many drafts the request has now."""
        if result.num_drafts is not None and state.num_placeholders == 0:
            state.num_drafts = result.num_drafts
