"""A scheduler alone: its plans, and answers to them."""

from __future__ import annotations

from fake_device import make_request
from harness import make_scheduler
from kvcache.kv_fakes import ONE_GROUP, layout_of

from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.step import RequestResult, StepResult


def scheduler_of(num_blocks=64, gates=(), **options):
    return make_scheduler(KVCacheManager(layout_of(ONE_GROUP, num_blocks)), gates, **options)


def long_request(request_id, prompt=(2, 3), **kwargs):
    return make_request(request_id, prompt, **{"max_tokens": 30, "ignore_eos": True, **kwargs})


def answer(plan, *results, tokens=7):
    """A result for every row of a plan: `tokens` where it samples, unless given in `results`."""
    given = {result.request_id: result for result in results}
    return StepResult(
        step_id=plan.step_id,
        results=[
            given.get(row.request_id)
            or RequestResult(
                request_id=row.request_id,
                incarnation=row.incarnation,
                token_ids=[tokens] if row.samples else [],
            )
            for row in plan.scheduled
        ],
    )


def shares(plan):
    return {row.request_id: row.num_tokens for row in plan.scheduled}
