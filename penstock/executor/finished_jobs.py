"""FinishedJobs: decides when a job that runs beside the steps has ended on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.adapter import FinishedJob

_Key = tuple[int, str]  # lane and digest


class FinishedJobs:
    """Ranks report a job in different steps. It has ended once all have reported it."""

    def __init__(self) -> None:
        self._reports: dict[_Key, dict[int, FinishedJob]] = {}  # by job and rank

    def merge(self, by_rank: Sequence[Sequence[FinishedJob]]) -> list[FinishedJob]:
        """Take in each rank's new reports. Return the jobs that have ended now on all ranks.

        A job that failed on any rank has failed. Only the first pipeline stage has a tower.
        """
        for rank, jobs in enumerate(by_rank):
            for job in jobs:
                self._reports.setdefault((job.lane, job.digest), {})[rank] = job
        ended = [key for key, reports in self._reports.items() if len(reports) == len(by_rank)]
        return [_joined(self._reports.pop(key)) for key in ended]

    def clear(self) -> None:
        """Forget what only some ranks have reported: all jobs are given again."""
        self._reports.clear()


def _joined(reports: dict[int, FinishedJob]) -> FinishedJob:
    jobs = [job for _, job in sorted(reports.items())]
    error = next((job.error for job in jobs if job.error is not None), None)
    changes_tower = any(job.changes_tower for job in jobs)
    return FinishedJob(jobs[0].digest, error, changes_tower, jobs[0].lane)
