"""A scheduler, a fake device and a client, wired as the engine's core wires them."""

from __future__ import annotations

from collections import defaultdict

from fake_device import FakeDevice, expected_output, salt_of
from kvcache.kv_fakes import ONE_GROUP, layout_of

from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.delta import FinishReason
from penstock.protocol.limits import StepLimits
from penstock.scheduler.gates import PENDING, READY, GateFailed
from penstock.scheduler.scheduler import Scheduler

DEFAULTS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 40}
OWN_OPTIONS = ("policy", "queue_timeout_s", "vocab_size", "max_loras", "max_cpu_loras")


def make_scheduler(kv, gates=(), **options):
    """`options` are limits of a step, or the scheduler's own."""
    own = {name: options.pop(name) for name in OWN_OPTIONS if name in options}
    return Scheduler(StepLimits(**(DEFAULTS | options)), kv, gates, **own)


class ListGate:
    """Requests pass unless the test named them."""

    def __init__(self):
        self.pending = set()
        self.failing = {}

    def poll(self, request):
        if request.request_id in self.failing:
            return GateFailed(self.failing[request.request_id])
        return PENDING if request.request_id in self.pending else READY


class Engine:
    """Keeps at most `depth` steps in flight and everything that clients were told."""

    def __init__(self, *, depth=1, groups=ONE_GROUP, num_blocks=64, caching=True, **options):
        self.depth = depth
        self.gate = ListGate()
        step_tokens = options.get("max_num_batched_tokens", DEFAULTS["max_num_batched_tokens"])
        layout = layout_of(groups, num_blocks, step_tokens)
        self.kv = KVCacheManager(layout, enable_prefix_caching=caching)
        self.scheduler = make_scheduler(self.kv, [self.gate], **options)
        self.limits = self.scheduler.limits
        self.device = FakeDevice(groups, self.limits.max_model_len)
        self.requests = {}
        self.tokens = defaultdict(list)
        self.endings = {}
        self.plans = []

    def add(self, request):
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.device.salts[request.request_id] = salt_of(request)
        if request.adapter is not None:
            self.device.adapters[request.request_id] = request.adapter.digest

    def launch(self):
        """Plan and launch one step; whether there was anything to do."""
        plan = self.scheduler.schedule()
        self.hear(self.scheduler.take_deltas())
        if plan is None:
            return False
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert plan.scheduled or plan.jobs or self.device.fetching, "an empty plan for nothing"
        assert len(plan.scheduled) <= self.limits.max_num_seqs
        self.device.launch(plan)
        self.plans.append(plan)
        return True

    def collect(self):
        self.hear(self.scheduler.update(self.device.collect()))

    def turn(self):
        """One turn of the core's loop."""
        launched = len(self.device.in_flight) < self.depth and self.launch()
        if self.device.in_flight and (not launched or len(self.device.in_flight) >= self.depth):
            self.collect()
        else:
            assert launched or not self.scheduler.has_unfinished(), "nothing moves any more"

    def drain(self):
        for _ in range(10_000):
            if not self.scheduler.has_unfinished() and not self.device.in_flight:
                return
            self.device.end_fetches()
            self.turn()
        raise AssertionError("some request never ends")

    def hear(self, deltas):
        for delta in deltas:
            assert delta.request_id not in self.endings, "told more after the end"
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.endings[delta.request_id] = delta

    def check_outputs(self):
        """Everybody ended, with the tokens that a request alone on a perfect machine has."""
        for request_id, request in self.requests.items():
            tokens, reason, stop_reason = expected_output(request, self.limits.max_model_len)
            tokens = tokens[len(request.output_token_ids) :]
            ending, seen = self.endings[request_id], self.tokens[request_id]
            if ending.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert seen == tokens[: len(seen)]
            else:
                assert seen == tokens
                assert (ending.finish_reason, ending.stop_reason) == (reason, stop_reason)

    def check_nothing_is_left(self):
        pool = self.kv.pool
        assert (pool.num_free, pool.num_draining) == (pool.num_usable, 0)
        assert self.scheduler.stats().num_running == self.scheduler.stats().num_waiting == 0
        adapters = self.scheduler.adapters
        assert (adapters.stats().running, adapters.stats().waiting) == ([], [])
        assert adapters._entries == adapters._copies
        assert not adapters._waits
