"""Random lives of requests on a device that answers late: the scheduler's promises, all at once."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_device import STOP_TOKEN, expected_output, make_adapter, make_request
from harness import Engine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcache.kv_fakes import HYBRID_GROUPS, ONE_GROUP, THREE_GROUPS, any_groups

from penstock.kvcache.layout import blocks_for_request
from penstock.protocol.errors import InputError
from penstock.protocol.step import StepFailure

MAX_MODEL_LEN = 32


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(1, 3),
        groups=st.one_of(st.sampled_from([ONE_GROUP, THREE_GROUPS, HYBRID_GROUPS]), any_groups()),
        spare_blocks=st.integers(0, 12),
        caching=st.booleans(),
        chunked=st.booleans(),
        num_batched_tokens=st.integers(1, 40),
        threshold=st.sampled_from([0, 0, 3]),
        max_num_seqs=st.integers(1, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        num_drafts=st.sampled_from([0, 0, 1, 3]),
        max_loras=st.integers(1, 3),
        spare_copies=st.integers(0, 2),
    )
    def start(
        self,
        depth,
        groups,
        spare_blocks,
        caching,
        chunked,
        num_batched_tokens,
        threshold,
        max_num_seqs,
        policy,
        num_drafts,
        max_loras,
        spare_copies,
    ):
        self.groups = groups
        step_tokens = num_batched_tokens if chunked else MAX_MODEL_LEN
        needed = blocks_for_request(groups, MAX_MODEL_LEN, max_step_tokens=step_tokens)
        self.engine = Engine(
            depth=depth,
            groups=groups,
            num_blocks=1 + needed + spare_blocks,
            caching=caching,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=step_tokens,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold if chunked else 0,
            policy=policy,
            num_drafts=num_drafts,
            max_loras=max_loras,
            max_cpu_loras=max_loras + spare_copies,
        )
        self.loads = {}

    def unfinished(self):
        return sorted(self.engine.requests.keys() - self.engine.endings.keys())

    @rule(
        data=st.data(),
        prompt=st.one_of(
            st.lists(st.integers(2, 3), min_size=1, max_size=MAX_MODEL_LEN - 1),
            st.integers(1, MAX_MODEL_LEN - 1).map(lambda length: ([2, 3, 4] * 11)[:length]),
        ),
        max_tokens=st.integers(1, 20),
        ignore_eos=st.booleans(),
        stops=st.booleans(),
        salt=st.sampled_from([None, None, "x"]),
        reads_cache=st.sampled_from([True, True, False]),
        adapter=st.sampled_from([None, None, *"ABCDE"]),
        gated=st.sampled_from([False, False, True]),
        fault=st.sampled_from([None, None, None, 0, 3]),
    )
    def add(
        self,
        data,
        prompt,
        max_tokens,
        ignore_eos,
        stops,
        salt,
        reads_cache,
        adapter,
        gated,
        fault,
    ):
        request_id = f"r{len(self.engine.requests)}"
        fields = {
            "max_tokens": max_tokens,
            "seed": data.draw(st.integers(0, 3), "seed"),
            "ignore_eos": ignore_eos,
            "stop_token_ids": [STOP_TOKEN] if stops else None,
            "min_tokens": data.draw(st.integers(0, max_tokens), "min_tokens"),
            "priority": data.draw(st.integers(0, 2), "priority"),
            "cache_salt": salt,
            "read_prefix_cache": reads_cache,
            "adapter": make_adapter(adapter) if adapter else None,
        }
        request = make_request(request_id, prompt, **fields)
        output, _, _ = expected_output(request, MAX_MODEL_LEN)
        num_replayed = data.draw(st.sampled_from([0, 0, len(output) // 2]), "replayed")
        request = make_request(request_id, prompt, output_token_ids=output[:num_replayed], **fields)
        if gated:
            self.engine.gate.pending.add(request_id)
        if fault is not None:
            self.engine.device.faults[request_id] = fault
        self.engine.add(request)

    @precondition(lambda self: len(self.engine.device.in_flight) < self.engine.depth)
    @rule()
    def launch(self):
        self.engine.launch()

    @precondition(lambda self: self.engine.device.in_flight)
    @rule()
    def execute(self):
        self.engine.device.execute_next()

    @precondition(lambda self: self.engine.device.in_flight)
    @rule()
    def collect(self):
        self.engine.collect()

    @rule(turns=st.integers(1, 8))
    def run(self, turns):
        for _ in range(turns):
            is_full = len(self.engine.device.in_flight) >= self.engine.depth
            if (is_full or not self.engine.launch()) and self.engine.device.in_flight:
                self.engine.collect()

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(self.unfinished()))
        self.engine.hear(self.engine.scheduler.finish([request_id, "unknown", request_id]))
        assert request_id in self.engine.endings

    @precondition(lambda self: self.engine.gate.pending)
    @rule(data=st.data(), passes=st.booleans())
    def open_gate(self, data, passes):
        request_id = data.draw(st.sampled_from(sorted(self.engine.gate.pending)))
        self.engine.gate.pending.remove(request_id)
        if not passes:
            self.engine.gate.failing[request_id] = "the grammar does not compile"

    @precondition(lambda self: ... in self.engine.device.fetching.values())
    @rule(data=st.data(), error=st.sampled_from([None, None, None, "its rank is too large"]))
    def end_fetch(self, data, error):
        fetching = self.engine.device.fetching
        open_ = sorted(digest for digest, end in fetching.items() if end is ...)
        self.engine.device.end_fetch(data.draw(st.sampled_from(open_)), error)

    @precondition(lambda self: self.engine.device.in_flight)
    @rule(failure=st.sampled_from([StepFailure.ERROR, StepFailure.OUT_OF_MEMORY, None]))
    def fail_step(self, failure):
        self.engine.device.fail()
        self.engine.hear(self.engine.scheduler.retry(failure))

    @rule(name=st.sampled_from("ABCDEF"), pin=st.booleans())
    def load_adapter(self, name, pin):
        adapters = self.engine.scheduler.adapters
        try:
            self.loads[len(self.loads)] = adapters.load(make_adapter(name), pin)
        except InputError:
            assert pin

    @rule(name=st.sampled_from("ABCDEF"))
    def unload_adapter(self, name):
        self.engine.scheduler.adapters.unload(make_adapter(name).digest)

    @rule()
    def reset_prefix_cache(self):
        self.engine.kv.reset_prefix_cache()

    @invariant()
    def every_block_is_accounted_for(self):
        if not hasattr(self, "engine"):
            return
        pool = self.engine.kv.pool
        held = Counter()
        for request_id in self.unfinished():
            for table in self.engine.kv.block_ids(self.engine.scheduler._requests[request_id]):
                held.update(block_id for block_id in table if block_id != 0)
        assert {b.id: b.ref_count for b in pool.blocks if b.ref_count} == dict(held)
        assert pool.num_free + pool.num_draining + len(held) == pool.num_usable

    @invariant()
    def adapters_are_within_their_limits(self):
        if not hasattr(self, "engine"):
            return
        adapters, device = self.engine.scheduler.adapters, self.engine.device
        assert adapters.stats().most_overtakes <= self.engine.limits.max_num_seqs
        assert device.most_copies <= adapters._max_copies + 1
        running = Counter(
            state.adapter.digest
            for state in self.engine.scheduler._running.in_order()
            if state.adapter is not None
        )
        entries = adapters._entries
        assert running == Counter({d: e.num_running for d, e in entries.items() if e.num_running})

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.gate.pending.clear()
        self.engine.drain()
        self.engine.check_outputs()
        for name in "ABCDEF":
            self.unload_adapter(name)
        while not all(answer.done() for answer in self.loads.values()):
            self.engine.device.end_fetches()
            assert self.engine.launch()
            self.engine.collect()
        self.engine.check_nothing_is_left()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.slow
class TestSchedulerAtLength(SchedulerMachine.TestCase):
    settings = settings(max_examples=500, stateful_step_count=80)
