"""Decides how many inputs of one HTTP request are on the engine at a time.

The engine runs requests in order. A client with thousands of texts must not block one with a single
text. So at most two steps' worth of a request's inputs are on the engine at a time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

from penstock.protocol.delta import EngineDelta
from penstock.protocol.pooling import PoolingParams
from penstock.protocol.request import EngineRequest
from penstock.server.http.replies import gather
from penstock.server.service import Service
from penstock.text.pooling import PreparedInput, join_pieces, pooling_info

TEXTS_AT_ONCE = 64  # that one thread tokenizes before other requests get a turn
NUM_TOKENIZERS = 2  # threads per request
GROUPS_AT_ONCE = 2  # so that the engine never waits for the next one

T = TypeVar("T")
R = TypeVar("R")


async def pool_all(
    service: Service,
    prepare: Callable[[T], PreparedInput],
    items: Sequence[T],
    params: PoolingParams,
    timeout_s: float | None = None,
) -> tuple[list[EngineRequest], list[EngineDelta]]:
    """Run all items. Returns the engine requests, and the last delta of each item.

    `prepare` converts an item to one request, or to several if it is long. Raises the same errors
    as `Service.outputs`.
    """
    prepared = await _prepare_all(service, prepare, items)
    requests = [request for item in prepared for request in item.pieces]
    deltas = await _run_all(service, requests, timeout_s)
    if len(requests) == len(prepared):
        return requests, deltas
    info, rest = pooling_info(service.frontend), iter(deltas)
    return requests, [
        join_pieces(info, params, item.pieces, list(islice(rest, len(item.pieces))))
        for item in prepared
    ]


async def _prepare_all(
    service: Service, prepare: Callable[[T], PreparedInput], items: Sequence[T]
) -> list[PreparedInput]:
    """Tokenize and check every input in a few threads. Raises for the first invalid one."""

    def work(part: Sequence[T]) -> list[PreparedInput]:
        return [prepare(item) for item in part]

    if len(items) <= TEXTS_AT_ONCE:
        return await service.in_thread(work, items)
    parts = [items[at : at + TEXTS_AT_ONCE] for at in range(0, len(items), TEXTS_AT_ONCE)]
    prepared = await _in_turn(
        [partial(service.in_thread, work, part) for part in parts], NUM_TOKENIZERS
    )
    return [item for part in prepared for item in part]


async def _run_all(
    service: Service, requests: Sequence[EngineRequest], timeout_s: float | None
) -> list[EngineDelta]:
    """Run requests in groups. Returns the last delta of each, in order."""
    groups = list(_groups(service, requests))
    service.check_queue(min(sum(map(len, groups[:GROUPS_AT_ONCE])), service.share))
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    async def run(group: Sequence[EngineRequest]) -> list[EngineDelta]:
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        return await service.run_to_end(group, left_s)

    done = await _in_turn([partial(run, group) for group in groups], GROUPS_AT_ONCE)
    return [delta for part in done for delta in part]


def _groups(service: Service, requests: Sequence[EngineRequest]) -> Iterator[list[EngineRequest]]:
    """Split requests into groups of at most one step's worth."""
    assert service.client.info is not None
    limits = service.client.info.limits
    most = max(min(limits.max_num_seqs, service.share // GROUPS_AT_ONCE), 1)
    group: list[EngineRequest] = []
    num_tokens = 0
    for request in requests:
        size = len(request.prompt_token_ids)
        if group and (len(group) == most or num_tokens + size > limits.max_num_batched_tokens):
            yield group
            group, num_tokens = [], 0
        group.append(request)
        num_tokens += size
    if group:
        yield group


async def _in_turn(
    starts: Sequence[Callable[[], Awaitable[list[R]]]], at_once: int
) -> list[list[R]]:
    """Run jobs, `at_once` at a time, and return all results. The first error cancels the rest."""
    results: list[list[R]] = [[] for _ in starts]
    waiting = iter(enumerate(starts))

    async def work() -> None:
        for index, start in waiting:  # the workers share this iterator
            results[index] = await start()

    await gather(*(work() for _ in range(min(at_once, len(starts)))))
    return results
