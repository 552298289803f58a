"""Simulates routing over 2 to 256 replicas: cache hits, balance and latency of each policy.

    python benchmarks/route_simulation.py
    python benchmarks/route_simulation.py --replicas 4 16 --trace multi-turn --json routes.json
    python benchmarks/route_simulation.py --plot docs/images/routing.png

The router, the schedulers and the KV caches are those of the package. Only the models are not
there: a step takes as long as `step_seconds` says, on a clock of the simulation. So results are the
same on every machine. Traces grow with the number of replicas:

    shared-prefix  Prompts begin with one of 8 prefixes a replica, of 2048 tokens, some far more
                   popular than others. Requests come at random.
    multi-turn     Conversations of 1 to 12 turns. They begin with one of 4 system prompts of 1024
                   tokens. Each turn sends all before it. Users take some seconds to answer.

Prints for each policy: prompt tokens served from the cache, also in percent of those that one
engine with unlimited memory would serve; requests and computed tokens of the busiest replica,
relative to the mean; the time to first token, the largest gap between tokens of a request, and the
CPU time of a choice on this machine.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine.messages import EngineInfo
from penstock.engine.routing import ReplicaRouter
from penstock.kvcache.hashing import HashChain
from penstock.kvcache.landmarks import CacheReport
from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.kv import FullAttentionSpec, KVCacheGroup, KVCacheLayout
from penstock.protocol.limits import StepLimits
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import RequestResult, StepPlan, StepResult
from penstock.scheduler.scheduler import Scheduler

POLICIES = ("round-robin", "least-loaded", "prefix")
REPLICAS = (2, 4, 16, 64, 256)
BLOCK_SIZE = 16
NUM_BLOCKS = 8192  # of a replica: 131,072 tokens
LIMITS = StepLimits(max_model_len=2**17, max_num_seqs=256, max_num_batched_tokens=2048)
VOCABULARY = 128_000


def step_seconds(num_tokens: int) -> float:
    """The time of a step: to read the weights of a large model once, and to compute tokens."""
    return 0.02 + 0.0001 * num_tokens


# -- what users send


@dataclass
class Turn:
    """One request, and what its user does when it has ended."""

    prompt: list[int]
    max_tokens: int
    user: int
    and_then: Callable[[list[int]], tuple[float, Turn] | None] = lambda output: None


Trace = Iterator[tuple[float, Turn]]  # when each user comes, and with what


def tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)


def shared_prefix(num_replicas: int, num_requests: int, seed: int = 0) -> Trace:
    """Poisson arrivals. The k-th most popular prefix is asked for 1/k as often as the first."""
    rng = random.Random(seed)
    prefixes = [tokens(rng, 2048) for _ in range(8 * num_replicas)]
    popularity = [1 / (k + 1) for k in range(len(prefixes))]
    now = 0.0
    for user in range(num_requests * num_replicas):
        now += rng.expovariate(6.0 * num_replicas)
        prefix = rng.choices(prefixes, popularity)[0]
        prompt = prefix + tokens(rng, rng.randrange(64, 512))
        yield now, Turn(prompt, rng.randrange(16, 112), user)


def multi_turn(num_replicas: int, num_requests: int, seed: int = 0) -> Trace:
    """Each user holds one conversation. `num_requests` counts turns."""
    rng = random.Random(seed)
    systems = [tokens(rng, 1024) for _ in range(4)]
    now, mean_turns = 0.0, 6.5
    for user in range(int(num_requests * num_replicas / mean_turns)):
        now += rng.expovariate(6.0 * num_replicas / mean_turns)
        yield now, next_turn(random.Random(f"{seed} {user}"), rng.choice(systems), user, 0)


def next_turn(rng: random.Random, history: list[int], user: int, turn: int) -> Turn:
    num_turns = random.Random(f"turns {user}").randrange(1, 13)
    prompt = history + tokens(rng, rng.randrange(32, 512))

    def and_then(output: list[int]) -> tuple[float, Turn] | None:
        if turn + 1 == num_turns:
            return None
        return rng.expovariate(1 / 4), next_turn(rng, prompt + output, user, turn + 1)

    return Turn(prompt, rng.randrange(16, 176), user, and_then)


TRACES = {"shared-prefix": shared_prefix, "multi-turn": multi_turn}


# -- replicas


@dataclass
class Timing:
    """What a user sees of a request."""

    sent_at: float
    turn: Turn | None  # None once it has ended
    output: list[int] = field(default_factory=list)
    first_at: float | None = None
    last_at: float = 0.0
    longest_gap: float = 0.0

    def add(self, output: list[int], now: float) -> None:
        if self.first_at is None:
            self.first_at = now
        else:
            self.longest_gap = max(self.longest_gap, now - self.last_at)
        self.last_at = now
        self.output += output


class Replica:
    """The scheduler and the KV cache of an engine. Its model generates random tokens."""

    def __init__(self, seed: int, num_blocks: int = NUM_BLOCKS) -> None:
        spec = FullAttentionSpec(num_kv_heads=1, head_dim=1, dtype="bfloat16")
        group = KVCacheGroup(spec=spec, block_size=BLOCK_SIZE, layer_names=["layer"])
        self.kv = KVCacheManager(
            KVCacheLayout(groups=[group], num_blocks=num_blocks + 1, page_bytes=64)
        )
        self.scheduler = Scheduler(LIMITS, self.kv)
        self.report = CacheReport(())
        self.kv.observe(self.report)
        self.info = EngineInfo(LIMITS, num_blocks, prefix_keys=self.kv.prefix_keys)
        self.plan: StepPlan | None = None  # of the step that runs
        self.num_requests = 0
        self._rng = random.Random(seed)

    @property
    def num_computed_tokens(self) -> int:
        return self.scheduler.num_scheduled_tokens

    def result(self) -> StepResult:
        assert self.plan is not None
        results = [
            RequestResult(
                request_id=row.request_id,
                incarnation=row.incarnation,
                token_ids=[self._rng.randrange(VOCABULARY)] if row.samples else [],
            )
            for row in self.plan.scheduled
        ]
        return StepResult(step_id=self.plan.step_id, results=results)


@dataclass(frozen=True)
class Outcome:
    """What became of a trace under one policy."""

    policy: str
    num_replicas: int
    num_requests: int
    hit_rate: float  # of prompt tokens
    ideal_hit_rate: float  # of one engine with unlimited memory
    busiest_by_requests: float  # relative to the mean
    busiest_by_tokens: float  # computed
    ttft_p50: float  # seconds
    ttft_p99: float
    gap_p99: float  # of each request's longest gap between tokens
    choose_us: float  # host time of a choice

    @property
    def share_of_ideal(self) -> float:
        return self.hit_rate / self.ideal_hit_rate


class Simulation:
    """Runs a trace on replicas behind a router, on a clock of its own."""

    def __init__(self, policy: Any, num_replicas: int) -> None:
        self.replicas = [Replica(number) for number in range(num_replicas)]
        self.router = ReplicaRouter(policy)
        for number, replica in enumerate(self.replicas):
            self.router.add(number, replica.info)
        self.timings: list[Timing] = []  # of each request
        self._ideal = UnlimitedCache()
        self._num_prompt_tokens = 0
        self._events: list[tuple[float, int, Any]] = []  # a replica's step ends, or a turn comes
        self._order = itertools.count()
        self._choose_s = 0.0

    def run(self, trace: Trace) -> Outcome:
        for at, turn in trace:
            self._at(at, turn)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, Turn):
                self._submit(event, now)
            else:
                self._end_step(event, now)
                self._begin_step(event, now)
        return self._outcome()

    def _at(self, when: float, event: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _submit(self, turn: Turn, now: float) -> None:
        request_id = str(len(self.timings))
        self.timings.append(Timing(now, turn))
        self._ideal.serve(turn.prompt)
        self._num_prompt_tokens += len(turn.prompt)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=turn.prompt,
            params=SamplingParams(max_tokens=turn.max_tokens, ignore_eos=True),
            seed=0,
        )
        started = time.thread_time()
        chosen = self.router.choose(request, None, range(len(self.replicas)))
        self._choose_s += time.thread_time() - started
        replica = self.replicas[chosen]
        replica.num_requests += 1
        replica.scheduler.add(request)
        if replica.plan is None:
            self._begin_step(chosen, now)

    def _begin_step(self, number: int, now: float) -> None:
        replica = self.replicas[number]
        replica.plan = replica.scheduler.schedule()
        if replica.plan is not None:
            self._at(now + step_seconds(replica.plan.num_tokens), number)

    def _end_step(self, number: int, now: float) -> None:
        replica = self.replicas[number]
        for delta in replica.scheduler.update(replica.result()):
            timing = self.timings[int(delta.request_id)]
            timing.add(delta.token_ids, now)
            self.router.started(delta.request_id)
            if delta.finish_reason is not None:
                self.router.finished(delta.request_id)
                self._go_on(timing, now)
        if (update := replica.report.take()) is not None:
            self.router.published(number, update)

    def _go_on(self, timing: Timing, now: float) -> None:
        turn, timing.turn = timing.turn, None
        assert turn is not None
        self._ideal.store(turn.prompt + timing.output)
        if (following := turn.and_then(timing.output)) is not None:
            self._at(now + following[0], following[1])

    def _outcome(self) -> Outcome:
        num_hits = sum(replica.kv.num_prefix_hits for replica in self.replicas)
        waits = sorted(t.first_at - t.sent_at for t in self.timings if t.first_at)
        gaps = sorted(t.longest_gap for t in self.timings)
        return Outcome(
            policy=self.router._policy,
            num_replicas=len(self.replicas),
            num_requests=len(self.timings),
            hit_rate=num_hits / self._num_prompt_tokens,
            ideal_hit_rate=self._ideal.num_hits / self._num_prompt_tokens,
            busiest_by_requests=busiest([r.num_requests for r in self.replicas]),
            busiest_by_tokens=busiest([r.num_computed_tokens for r in self.replicas]),
            ttft_p50=statistics.median(waits),
            ttft_p99=waits[int(len(waits) * 0.99)],
            gap_p99=gaps[int(len(gaps) * 0.99)],
            choose_us=self._choose_s / len(self.timings) * 1e6,
        )


class UnlimitedCache:
    """The prefix cache of one engine that serves everything and never evicts."""

    def __init__(self) -> None:
        self.num_hits = 0  # prompt tokens
        self._hashes: set[bytes] = set()

    def _hash(self, token_ids: list[int]) -> list[bytes]:
        chain = HashChain(b"", BLOCK_SIZE)
        chain.extend(token_ids)
        return chain.hashes

    def serve(self, prompt: list[int]) -> None:
        """Count what is cached of a prompt, and cache the rest."""
        hashes = self._hash(prompt)
        most = (len(prompt) - 1) // BLOCK_SIZE
        cached = itertools.takewhile(self._hashes.__contains__, hashes[:most])
        self.num_hits += BLOCK_SIZE * sum(1 for _ in cached)
        self._hashes.update(hashes)

    def store(self, token_ids: list[int]) -> None:
        self._hashes.update(self._hash(token_ids))


def busiest(work: Sequence[int]) -> float:
    return max(work) / statistics.mean(work)


def simulate(policy: Any, trace: str, num_replicas: int, num_requests: int) -> Outcome:
    """Run a trace of `num_requests` requests for each replica."""
    return Simulation(policy, num_replicas).run(TRACES[trace](num_replicas, num_requests))


# -- the command


HEADER = (
    "trace          replicas  policy        hits  of ideal  busiest: requests  tokens  "
    "ttft p50     p99  gap p99  choice"
)


def line(trace: str, outcome: Outcome) -> str:
    return (
        f"{trace:13}  {outcome.num_replicas:8}  {outcome.policy:12}  {outcome.hit_rate:4.0%}  "
        f"{outcome.share_of_ideal:8.0%}  {outcome.busiest_by_requests:17.2f}  "
        f"{outcome.busiest_by_tokens:6.2f}  {outcome.ttft_p50:6.2f} s  {outcome.ttft_p99:4.1f} s  "
        f"{outcome.gap_p99:5.2f} s  {outcome.choose_us:3.0f} us"
    )


def plot(outcomes: dict[str, list[Outcome]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [
        ("hits, % of one engine's", lambda o: 100 * o.share_of_ideal),
        ("requests, busiest / mean", lambda o: o.busiest_by_requests),
        ("time to first token, p99, s", lambda o: o.ttft_p99),
    ]
    figure, axes = pyplot.subplots(
        len(rows), len(outcomes), figsize=(9, 8), sharex=True, squeeze=False, sharey="row"
    )
    for column, (trace, found) in enumerate(outcomes.items()):
        for row, (label, value) in enumerate(rows):
            axis = axes[row][column]
            for policy in POLICIES:
                own = [o for o in found if o.policy == policy]
                axis.plot([o.num_replicas for o in own], list(map(value, own)), "o-", label=policy)
            axis.set_xscale("log", base=2)
            axis.set_xticks([o.num_replicas for o in own], [str(o.num_replicas) for o in own])
            axis.grid(alpha=0.3)
            axis.set_ylabel(label if column == 0 else "")
            if row == len(rows) - 1:
                axis.set_xlabel("replicas")
                axis.set_yscale("log")
        axes[0][column].set_title(trace)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=list(REPLICAS))
    parser.add_argument("--trace", choices=TRACES, nargs="+", default=list(TRACES))
    parser.add_argument("--policy", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument(
        "--requests", type=int, help="requests per replica; default: fewer for more replicas"
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--plot", type=Path, help="write a plot to this file")
    args = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {}
    print(HEADER)
    for trace, num_replicas, policy in itertools.product(args.trace, args.replicas, args.policy):
        num_requests = args.requests or min(max(3200 // num_replicas, 25), 100)
        outcome = simulate(policy, trace, num_replicas, num_requests)
        outcomes.setdefault(trace, []).append(outcome)
        print(line(trace, outcome), flush=True)
    if args.json is not None:
        rows = {trace: [asdict(outcome) for outcome in found] for trace, found in outcomes.items()}
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot is not None:
        plot(outcomes, args.plot)


if __name__ == "__main__":
    main()
