"""Why a confined job has no result. None of these is a verdict about what the job was given,
except `TooMuchTime` and `TooMuchMemory`, and those only under the limits of that moment."""

from __future__ import annotations

from penstock.protocol.errors import PenstockError


class JobError(PenstockError):
    """A job that has no result."""


class TooMuchTime(JobError):
    """It used up its CPU time."""


class TooMuchMemory(JobError):
    """It asked for more memory than it may have, or crashed its process twice."""


class WorkerLost(JobError):
    """Its process was killed or stood still, twice. The job may be sent again."""


class PoolFull(JobError):
    """Too many jobs wait already. The job may be sent again later."""


class PoolClosed(JobError):
    """There will be no more results."""
