"""Attaches the content of media to a plan, for ranks on machines without the files."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.protocol.media import EncodeMedia
from penstock.protocol.step import Job, StepPlan


def encodes_media(plan: StepPlan) -> bool:
    return any(isinstance(job, EncodeMedia) for job in plan.jobs)


def with_content(plan: StepPlan) -> StepPlan:
    """The plan with the content of all media that it encodes."""
    return msgspec.structs.replace(plan, jobs=_attach(plan.jobs))


def _attach(jobs: Sequence[Job]) -> list[Job]:
    attached: list[Job] = []
    for job in jobs:
        if isinstance(job, EncodeMedia):
            # Without the file, the step fails on all ranks.
            with contextlib.suppress(FileNotFoundError):
                job = msgspec.structs.replace(job, content=Path(job.item.path).read_bytes())
        attached.append(job)
    return attached
