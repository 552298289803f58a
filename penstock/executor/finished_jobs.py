"""FinishedJobs: decides when a job that runs beside the steps has ended on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.adapter import FinishedJob


class FinishedJobs:
    """Ranks report a job in different steps. It has ended once all have reported it."""

    def __init__(self) -> None:
        self._reports: dict[str, dict[int, FinishedJob]] = {}  # by digest and rank

    def merge(self, by_rank: Sequence[Sequence[FinishedJob]]) -> list[FinishedJob]:
        """Take in each rank's new reports. Return the jobs that have ended now on all ranks.

        A job that failed on any rank has failed. Only the first pipeline stage has a tower.
        """
        for rank, jobs in enumerate(by_rank):
            for job in jobs:
                self._reports.setdefault(job.digest, {})[rank] = job
        ended = [d for d, reports in self._reports.items() if len(reports) == len(by_rank)]
        return [_joined(digest, self._reports.pop(digest)) for digest in ended]

    def clear(self) -> None:
        """Forget what only some ranks have reported: all jobs are given again."""
        self._reports.clear()


def _joined(digest: str, reports: dict[int, FinishedJob]) -> FinishedJob:
    jobs = [job for _, job in sorted(reports.items())]
    error = next((job.error for job in jobs if job.error is not None), None)
    return FinishedJob(digest, error, any(job.changes_tower for job in jobs))
