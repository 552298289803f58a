"""Drives a worker with hand-made plans: requests with adapter slots, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_engine import open_llm
from waiting import eventually

from penstock import SamplingParams
from penstock.executor.in_process import InProcessExecutor
from penstock.loading.adapters.source import adapter_digest
from penstock.protocol.adapter import Adapter, FetchAdapter, FinishedJob, PlaceAdapter
from penstock.protocol.step import (
    NO_SLOT,
    Job,
    NewRequest,
    ScheduledRequest,
    StepPlan,
    StepResult,
)

PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=3)


@dataclass
class Running:
    """A request in the worker's tables."""

    request_id: str
    prompt: list[int]
    slot: int = NO_SLOT
    num_computed: int = 0
    num_blocks: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)  # exact, of the likeliest tokens

    @property
    def bits(self) -> tuple[list[int], list[list[float]]]:
        return self.tokens, self.logprobs


class Driver:
    """One engine's worker. Every request gets blocks of its own."""

    def __init__(self, checkpoint: Path | str, **options: Any) -> None:
        options = {"enable_lora": True, "max_lora_rank": 64, "max_loras": 4} | options
        self.llm = open_llm(checkpoint, **options)
        executor = self.llm.engine.executor
        assert isinstance(executor, InProcessExecutor)
        self.executor = executor
        self.block_size = executor.runner.tables.groups[0].block_size
        self._num_blocks = 1  # block 0 is the null block
        self._num_steps = 10**6
        self._num_requests = 0
        self.reports: list[FinishedJob] = []

    def close(self) -> None:
        self.llm.close()

    def step(
        self,
        scheduled: Sequence[tuple[Running, int]] = (),  # with the number of tokens
        jobs: Sequence[Job] = (),
        released: Sequence[Running] = (),
    ) -> StepResult:
        """Run one step. A request enters with its first one."""
        new, items = [], []
        for request, count in scheduled:
            if request.num_computed == 0:
                new.append(
                    NewRequest(
                        request_id=request.request_id,
                        token_ids=request.prompt,
                        num_prompt_tokens=len(request.prompt),
                        num_computed_tokens=0,
                        params=PARAMS,
                        seed=0,
                        adapter_slot=request.slot,
                    )
                )
            request.num_computed += count
            blocks = -(-request.num_computed // self.block_size) - request.num_blocks
            ids = list(range(self._num_blocks, self._num_blocks + blocks))
            self._num_blocks += blocks
            request.num_blocks += blocks
            samples = request.num_computed >= len(request.prompt)
            groups = len(self.executor.runner.tables.groups)
            new_ids = [ids] * groups if ids else []
            items.append(ScheduledRequest(request.request_id, 0, count, samples, new_ids))
        self._num_steps += 1
        self.executor.launch(
            StepPlan(
                step_id=self._num_steps,
                scheduled=items,
                new_requests=new,
                jobs=list(jobs),
                released_ids=[request.request_id for request in released],
            )
        )
        result = self.executor.collect()
        self.reports += result.finished_jobs
        by_id = {request.request_id: request for request, _ in scheduled}
        for own in result.results:
            request = by_id[own.request_id]
            request.tokens += own.token_ids
            request.logprobs += [entry.logprobs for entry in own.logprobs]
        return result

    def fetch(self, path: Path, name: str = "adapter") -> str:
        """Load an adapter into host memory. Returns its digest."""
        digest = adapter_digest(path)
        self.step(jobs=[FetchAdapter(Adapter(name, digest, str(path)))])

        def has_ended() -> bool:
            self.step()
            return any(report.digest == digest for report in self.reports)

        eventually(has_ended)
        (report,) = [report for report in self.reports if report.digest == digest]
        self.reports.remove(report)
        assert report.error is None, report.error
        return digest

    def load(self, path: Path, slot: int) -> None:
        """Load an adapter into a slot."""
        self.step(jobs=[PlaceAdapter(self.fetch(path), slot)])

    def request(self, prompt: dict[str, list[int]], slot: int = NO_SLOT) -> Running:
        self._num_requests += 1
        return Running(f"lora-{self._num_requests}", prompt["prompt_token_ids"], slot)

    def generate(
        self, requests: Sequence[Running], num_tokens: int = 16, chunk: int = 10**6
    ) -> list[Running]:
        """Compute requests together, prompts in chunks, and release them."""
        while any(len(request.tokens) < num_tokens for request in requests):
            running = [request for request in requests if len(request.tokens) < num_tokens]
            self.step(
                [
                    (request, min(chunk, max(len(request.prompt) - request.num_computed, 1)))
                    for request in running
                ]
            )
        self.step(released=requests)
        return list(requests)
