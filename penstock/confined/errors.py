"""Errors of confined jobs.

Only `TooMuchTime` and `TooMuchMemory` say something about the job's input, and only under the
current limits.
"""

from __future__ import annotations

from penstock.protocol.errors import PenstockError


class JobError(PenstockError):
    """The job has no result."""


class TooMuchTime(JobError):
    """The job exceeded its CPU time."""


class TooMuchMemory(JobError):
    """The job exceeded its memory limit, or crashed its process twice."""


class WorkerLost(JobError):
    """The job's process was killed or stalled, twice. The job may be sent again."""


class PoolFull(JobError):
    """The queue is full. The job may be sent again later."""


class PoolClosed(JobError):
    """The pool is closed."""
