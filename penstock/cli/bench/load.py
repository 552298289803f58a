"""Load: decides when each request is sent and how many run at once. Runs the load."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Literal

import msgspec

from penstock.cli.bench.http import HttpClient, HttpError
from penstock.cli.bench.prompts import BenchRequest
from penstock.cli.bench.streams import Content, Dialect, StreamRecord, ask
from penstock.cli.bench.workloads import VOCAB
from penstock.protocol.errors import ConfigError, RequestFault

_TRIAL = BenchRequest([1, 2, 3, 4], 1)
_REFUSALS = (400, 422)  # statuses by which a server may refuse a request's fields


@dataclass(frozen=True)
class Ramp:
    """A rate that rises (or falls) from the first request to the last."""

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def rate(self, share: float) -> float:
        """Requests per second after `share` (0 to 1) of the requests."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * share
        return float(self.start_rps * (self.end_rps / self.start_rps) ** share)


@dataclass(frozen=True)
class Load:
    """How requests are sent.

    Open loop: `request_rate` requests per second on average, independent of the answers. The gaps
    are gamma distributed: `burstiness` 1 is a Poisson process, less is burstier, more is more even.
    An infinite rate sends all requests at once. Closed loop: at most `max_concurrency` requests are
    in flight. Further requests wait.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    timeout_s: float = 600.0
    ramp: Ramp | None = None  # then `request_rate` is not used

    def due_times(self, num_requests: int, seed: int) -> list[float]:
        """The send time of each request, in seconds from the start. The first is 0."""
        if math.isinf(self.request_rate) and self.ramp is None:
            return [0.0] * num_requests
        rng = random.Random(f"arrivals {seed}")

        def rate(index: int) -> float:
            return self.ramp.rate(index / num_requests) if self.ramp else self.request_rate

        gaps = (
            rng.gammavariate(self.burstiness, 1 / (rate(index) * self.burstiness))
            for index in range(num_requests - 1)
        )
        return list(itertools.accumulate(gaps, initial=0.0))


@dataclass
class LoadResult:
    records: list[StreamRecord]  # by due time
    started: float
    ended: float
    max_in_flight: int
    drafts: DraftTotals | None = None  # None: the server does not tell


async def run_load(
    client: HttpClient,
    dialect: Dialect,
    requests: Sequence[BenchRequest],
    due_times: Sequence[float],
    load: Load,
    on_done: Callable[[], object] = lambda: None,
) -> LoadResult:
    """Send every request at its time and wait for all answers.

    Later turns of a conversation follow as soon as the turn before them is answered.
    """
    places = asyncio.Semaphore(load.max_concurrency or len(requests))
    num_in_flight = max_in_flight = 0

    async def send(request: BenchRequest, record: StreamRecord) -> None:
        nonlocal num_in_flight, max_in_flight
        num_in_flight += 1
        max_in_flight = max(max_in_flight, num_in_flight)
        try:
            while True:
                record.texts = [] if request.followups else None
                await ask(client, dialect, request, record, load.timeout_s)
                on_done()
                following = None if record.error is not None else request.next_turn(record.text)
                if following is None:
                    break
                request, record = following, dialect.new_record(time.perf_counter())
                records.append(record)
        finally:
            num_in_flight -= 1
            places.release()

    started = time.perf_counter()
    records: list[StreamRecord] = []
    sending = []
    for request, due in zip(requests, due_times, strict=True):
        while (wait_s := started + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)  # may end a little early
        await places.acquire()
        record = dialect.new_record(started + due)
        records.append(record)
        sending.append(asyncio.ensure_future(send(request, record)))
    await asyncio.gather(*sending)
    return LoadResult(records, started, time.perf_counter(), max_in_flight)


async def warm_up(
    client: HttpClient,
    dialect: Dialect,
    requests: Sequence[BenchRequest],
    count: int,
    load: Load,
    seed: int,
) -> None:
    """Send `count` requests that are not measured, with the lengths of the measured ones.

    Prompts of token ids are replaced by others, so that the prefix cache does not hold the measured
    ones.
    """
    rng = random.Random(f"warm-up {seed}")
    sent = []
    for request in itertools.islice(itertools.cycle(requests), count):
        request = replace(request, followups=())
        if not isinstance(request.prompt, str):
            request = replace(request, prompt=[rng.randint(0, VOCAB) for _ in request.prompt])
        sent.append(request)
    if sent:
        result = await run_load(client, dialect, sent, [0.0] * count, load)
        for record in result.records:
            if record.error is not None:
                raise RequestFault(f"a request to warm up failed: {record.error}")


async def first_model(client: HttpClient, timeout_s: float) -> str:
    """Return the first name in the server's list of models."""
    content = Content()
    try:
        await asyncio.wait_for(client.get("/v1/models", content), timeout_s)
    except (HttpError, asyncio.TimeoutError) as error:
        why = str(error) or f"no answer within {timeout_s:g} s"
        raise RequestFault(f"cannot ask the server for its models: {why}") from error
    try:
        return msgspec.json.decode(content.body, type=_Models).data[0].id
    except (msgspec.MsgspecError, IndexError) as error:
        raise RequestFault(
            f"/v1/models names no model (HTTP {content.status}): give one with --model"
        ) from error


@dataclass(frozen=True)
class DraftTotals:
    """A server's counts of speculative decoding."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def __sub__(self, other: DraftTotals) -> DraftTotals:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return DraftTotals(*(mine - theirs for mine, theirs in pairs))


async def control_profiler(client: HttpClient, action: str, timeout_s: float) -> None:
    """Start or stop the server's profiler. Raises `ConfigError` if it has none."""
    content = Content()
    path = f"/{action}_profile"
    try:
        await asyncio.wait_for(client.post(path, b"{}", content), timeout_s)
    except (HttpError, asyncio.TimeoutError) as error:
        raise ConfigError(f"--profile: {path} failed: {error}") from error
    if content.status != 200:
        raise ConfigError(
            f"--profile: {path} answered {content.status}: start the server with --profiler-config"
        )


async def read_drafts(client: HttpClient, timeout_s: float) -> DraftTotals | None:
    """Return the totals from the server's /metrics, or None if it has none."""
    content = Content()
    try:
        await asyncio.wait_for(client.get("/metrics", content), timeout_s)
    except (HttpError, asyncio.TimeoutError):
        return None
    text = content.body.decode(errors="replace")
    totals = []
    for field in fields(DraftTotals):
        found = re.findall(rf"^[\w:]*spec_decode_{field.name}_total(?:{{.*}})? (\S+)$", text, re.M)
        if not found:
            return None
        totals.append(int(sum(map(float, found))))
    return DraftTotals(*totals)


async def agree(client: HttpClient, dialect: Dialect, timeout_s: float) -> Dialect:
    """Return `dialect` without the features that the server refuses. Tries one-token requests.

    Raises `RequestFault` with the server's first error if it refuses all of them.
    """
    objection = ""
    for takes_token_ids, takes_usage in itertools.product(
        _downwards(dialect.takes_token_ids), _downwards(dialect.takes_usage)
    ):
        attempt = replace(dialect, takes_token_ids=takes_token_ids, takes_usage=takes_usage)
        record = attempt.new_record(time.perf_counter())
        await ask(client, attempt, _TRIAL, record, timeout_s)
        if record.error is None:
            return attempt
        objection = objection or record.error
        if record.status not in _REFUSALS:
            break
    raise RequestFault(f"a trial request to {dialect.path} failed: {objection}")


def _downwards(most: bool) -> tuple[bool, ...]:
    return (True, False) if most else (False,)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]
