"""Crowds of requests in caches that are far too small, each crowd from one seed.

Denser than what the state machine finds by itself: conversations that build on one another,
preemption in most steps, faults and aborts among rows that share blocks.
"""

from __future__ import annotations

import random

import pytest
from fake_device import STOP_TOKEN, expected_output, make_request
from harness import Engine
from kvcache.kv_fakes import (
    CROSS_GROUPS,
    HYBRID_GROUPS,
    ONE_GROUP,
    THREE_GROUPS,
)

from penstock.kvcache.layout import blocks_for_request

MAX_MODEL_LEN = 40


def random_engine(rng):
    groups = rng.choice([ONE_GROUP, THREE_GROUPS, HYBRID_GROUPS, CROSS_GROUPS])
    chunked = rng.random() < 0.8
    step_tokens = rng.randint(2, 30) if chunked else MAX_MODEL_LEN
    needed = blocks_for_request(groups, MAX_MODEL_LEN, max_step_tokens=step_tokens)
    return Engine(
        depth=rng.randint(1, 3),
        groups=groups,
        num_blocks=1 + needed + rng.randint(0, 3) * len(groups),
        caching=rng.random() < 0.8,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.randint(2, 8),
        max_num_batched_tokens=step_tokens,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice([0, 0, 5]) if chunked else 0,
        policy=rng.choice(["fcfs", "priority"]),
        num_drafts=rng.choice([0, 0, 1, 3]),
    )


def random_prompt(rng, engine):
    """New, begun like the others, or the next turn of a conversation."""
    if engine.requests and rng.random() < 0.5:
        earlier = rng.choice(list(engine.requests.values()))
        output, _, _ = expected_output(earlier, MAX_MODEL_LEN)
        prompt = earlier.prompt_token_ids + output + [5] * rng.randint(0, 4)
        if len(prompt) < MAX_MODEL_LEN:
            return prompt
    length = rng.randint(1, 24)
    return ([2, 3, 4] * 8)[:length] if rng.random() < 0.6 else rng.choices(range(2, 5), k=length)


def add_random_request(rng, engine):
    request_id = f"r{len(engine.requests)}"
    prompt, max_tokens = random_prompt(rng, engine), rng.randint(1, 24)
    fields = {
        "max_tokens": max_tokens,
        "seed": rng.randint(0, 2),
        "ignore_eos": rng.random() < 0.8,
        "stop_token_ids": [STOP_TOKEN] if rng.random() < 0.2 else None,
        "min_tokens": rng.randint(0, max_tokens),
        "priority": rng.randint(0, 2),
        "cache_salt": "x" if rng.random() < 0.1 else None,
    }
    output, _, _ = expected_output(make_request(request_id, prompt, **fields), MAX_MODEL_LEN)
    seen = output[: rng.choice([0, 0, 0, len(output) // 2])]
    if rng.random() < 0.15:
        engine.device.faults[request_id] = rng.choice([0, len(output) // 2])
    engine.add(make_request(request_id, prompt, output_token_ids=seen, **fields))


def run_workload(seed):
    rng = random.Random(seed)
    engine = random_engine(rng)
    num_requests = rng.randint(5, 25)
    while len(engine.requests) < num_requests:
        for _ in range(rng.randint(0, 4)):
            add_random_request(rng, engine)
        if rng.random() < 0.05:
            victim = rng.choice(list(engine.requests) or ["nobody"])
            engine.hear(engine.scheduler.finish([victim]))
        if rng.random() < 0.3:
            engine.device.execute_next()
        engine.turn()
    engine.drain()
    engine.check_outputs()
    engine.check_nothing_is_left()
    return engine


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_every_request_of_a_crowd_ends_with_its_own_tokens(first):
    for seed in range(first, first + 20):
        run_workload(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 100))
def test_every_request_of_many_crowds_ends_with_its_own_tokens(first):
    for seed in range(first, first + 100):
        run_workload(seed)


def test_the_crowds_meet_what_they_are_meant_to_meet():
    stats = [run_workload(seed).scheduler.stats() for seed in range(40)]
    assert sum(s.num_preemptions for s in stats) > 100
    assert sum(s.num_prefix_hits for s in stats) > 1000
