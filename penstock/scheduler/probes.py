"""Probes: decides when drafts that do not pay are tried again, so that it hardly costs time."""

from __future__ import annotations

FIRST_WAIT, LONGEST_WAIT = 64, 2048  # steps between two probes
SHARE = 0.005  # of the time, which probes may take


class Probes:
    """A probe is a step that proposes drafts and one that verifies them.

    The longer it takes, the longer the next one waits: its steps compute more rows, and steps of a
    rare size may compile or capture something. What it takes shows in other steps in flight, too,
    so all steps are timed from its plan to its end.
    """

    def __init__(self) -> None:
        self._wait = FIRST_WAIT
        self._num_idle = 0  # steps without drafts since the last probe
        self._started_at: float | None = None  # None: no probe is in flight
        self._num_steps = 0  # collected since then

    def is_due(self, now: float) -> bool:
        """Count a step that is planned without drafts. Whether it is a probe's first instead."""
        self._num_idle += 1
        if self._num_idle < self._wait:
            return False
        self._num_idle, self._num_steps, self._started_at = 0, 0, now
        self._wait = FIRST_WAIT
        return True

    def count_step(self) -> None:
        """A step was collected."""
        self._num_steps += 1

    def end(self, now: float, plain_seconds: float) -> None:
        """The last step was the probe's. `plain_seconds`: what it would take without drafts."""
        if self._started_at is not None:
            longer = (now - self._started_at) / plain_seconds - self._num_steps  # in steps
            self._wait = int(min(max(longer / SHARE, FIRST_WAIT), LONGEST_WAIT))
            self._started_at = None

    def cancel(self) -> None:
        """Prompts were computed. If a probe is in flight, its time tells nothing."""
        self._started_at = None
