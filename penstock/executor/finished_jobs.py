"""FinishedJobs: decides when a job that runs beside the steps has ended on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.adapter import FinishedJob


class FinishedJobs:
    """Ranks report a job in different steps. It has ended once all have reported it."""

    def __init__(self) -> None:
        self._reports: dict[str, dict[int, str | None]] = {}  # by digest and rank: the error

    def merge(self, by_rank: Sequence[Sequence[FinishedJob]]) -> list[FinishedJob]:
        """Take in each rank's new reports. Return the jobs that have ended now on all ranks.

        A job that failed on any rank has failed.
        """
        for rank, jobs in enumerate(by_rank):
            for job in jobs:
                self._reports.setdefault(job.digest, {})[rank] = job.error
        ended = [d for d, reports in self._reports.items() if len(reports) == len(by_rank)]
        return [FinishedJob(digest, _first(self._reports.pop(digest))) for digest in ended]

    def clear(self) -> None:
        """Forget what only some ranks have reported: all jobs are given again."""
        self._reports.clear()


def _first(errors: dict[int, str | None]) -> str | None:
    return next((error for _, error in sorted(errors.items()) if error is not None), None)
