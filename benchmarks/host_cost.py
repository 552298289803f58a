"""CPU time that the host spends per request and token: the scheduler and the API process.

    python benchmarks/host_cost.py
    python benchmarks/host_cost.py --compare ../other-checkout --rounds 5 --json costs.json

No model runs: the scheduler gets synthetic results, the API process synthetic tokens. With
`--compare`, both checkouts are measured alternately, in separate processes, and printed side by
side. Results are CPU times, as medians of many steps and all rounds, so other load on the machine
matters little. The cost of a running request is that of `schedule` and `update` together. In decode
steps no request enters or leaves. In mixed steps requests end after 64 tokens on average, and
others with prompts of 32 to 64 tokens take their places.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from api_cost import measure_api, measure_several_apis

BLOCK_SIZE = 16
NUM_IN_FLIGHT = 2  # as on a GPU
RUNNING = (10, 100, 1000, 4000)
LONG_PROMPT = 128 * 1024


# -- the scheduler


def make_scheduler(max_num_seqs: int, max_model_len: int, num_blocks: int) -> Any:
    from penstock.kvcache.manager import KVCacheManager
    from penstock.protocol.kv import FullAttentionSpec, KVCacheGroup, KVCacheLayout
    from penstock.protocol.limits import StepLimits
    from penstock.scheduler.scheduler import Scheduler

    spec = FullAttentionSpec(num_kv_heads=1, head_dim=1, dtype="bfloat16")
    group = KVCacheGroup(spec=spec, block_size=BLOCK_SIZE, layer_names=["layer"])
    layout = KVCacheLayout(groups=[group], num_blocks=num_blocks, page_bytes=64)
    limits = StepLimits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=2**20, max_model_len=max_model_len
    )
    return Scheduler(limits, KVCacheManager(layout))


def make_request(number: int, prompt: list[int], max_tokens: int) -> Any:
    from penstock.protocol.request import EngineRequest
    from penstock.protocol.sampling import SamplingParams

    return EngineRequest(
        request_id=f"chatcmpl-0123456789abcdef-{number}",
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens),
        seed=number,
        eos_token_ids=[1, 2],
    )


def answer(plan: Any) -> Any:
    """The result that a runner would return for a plan."""
    from penstock.protocol.step import RequestResult, StepResult

    results = [
        RequestResult(
            request_id=row.request_id,
            incarnation=row.incarnation,
            token_ids=[1000 + plan.step_id] if row.samples else [],
        )
        for row in plan.scheduled
    ]
    return StepResult(step_id=plan.step_id, results=results)


class Crowd:
    """A number of running requests. With `turnover`, new requests replace those that end."""

    def __init__(self, num_running: int, turnover: bool) -> None:
        self.num_running = num_running
        self._turnover = turnover
        self._random = random.Random(0)
        self._numbers = iter(range(10**9))
        self._in_flight: deque[Any] = deque()
        self.scheduler = make_scheduler(num_running, 640, 1 + num_running * 40)
        for _ in range(num_running):
            self._add(64 if turnover else 100_000)

    def _add(self, max_tokens: int) -> None:
        prompt = self._random.choices(range(3, 30_000), k=self._random.randint(32, 64))
        if self._turnover:
            max_tokens = self._random.randint(1, 2 * max_tokens)
        self.scheduler.add(make_request(next(self._numbers), prompt, max_tokens))

    def step(self) -> float:
        """One step; its CPU seconds."""
        if self._turnover:
            while len(self.scheduler._requests) < self.num_running:
                self._add(64)
        begin = time.thread_time_ns()
        plan = self.scheduler.schedule()
        cost = time.thread_time_ns() - begin
        self._in_flight.append(answer(plan))
        if len(self._in_flight) < NUM_IN_FLIGHT:
            return cost * 1e-9
        result = self._in_flight.popleft()
        begin = time.thread_time_ns()
        self.scheduler.update(result)
        return (cost + time.thread_time_ns() - begin) * 1e-9


def measure_steps() -> dict[str, float]:
    costs = {}
    for num_running in RUNNING:
        for turnover in (False, True):
            for collector in (False, True):
                crowd = Crowd(num_running, turnover)
                num_steps = 100 if num_running < 4000 else 48
                for _ in range(num_steps // 4):
                    crowd.step()
                # A collection comes once in many steps: with the collector on, the mean counts.
                with collecting(collector):
                    steps = [crowd.step() for _ in range(num_steps)]
                typical = statistics.fmean(steps) if collector else statistics.median(steps)
                name = (
                    f"{'mixed' if turnover else 'decode'} step, {num_running:,} running, "
                    f"collector {'on' if collector else 'off'}: us a running request"
                )
                costs[name] = 1e6 * typical / num_running
    return costs


@contextlib.contextmanager
def collecting(collector: bool) -> Iterator[None]:
    """The heap as in a running engine, with or without Python's garbage collector."""
    from penstock.engine.heap import settled_heap

    gc.collect()
    with settled_heap():
        (gc.enable if collector else gc.disable)()
        yield
        gc.enable()


def measure_aborts() -> dict[str, float]:
    crowd = Crowd(4000, turnover=False)
    for _ in range(3):
        crowd.step()
    request_ids = list(crowd.scheduler._requests)
    random.Random(0).shuffle(request_ids)
    begin = time.thread_time_ns()
    for request_id in request_ids:
        crowd.scheduler.finish([request_id])
    cost = 1e-3 * (time.thread_time_ns() - begin)
    return {"abort of one of 4,000 running: us (mean of all)": cost / len(request_ids)}


def measure_admission() -> dict[str, float]:
    length = LONG_PROMPT + 64
    scheduler = make_scheduler(8, length, 3 * length // BLOCK_SIZE)
    prompt = random.Random(0).choices(range(3, 30_000), k=LONG_PROMPT + 1)
    costs = []
    for number in range(12):
        scheduler.add(make_request(number, prompt, 2))
        begin = time.thread_time_ns()
        plan = scheduler.schedule()
        costs.append(1e-6 * (time.thread_time_ns() - begin))
        scheduler.update(answer(plan))
        while scheduler.has_unfinished():
            scheduler.update(answer(scheduler.schedule()))
    num_cached = scheduler.stats().num_prefix_hits
    assert num_cached == 11 * LONG_PROMPT, f"{num_cached} tokens were cached"
    return {"admission of 128k tokens, all cached: ms": statistics.median(costs[1:])}


def measure_messages() -> dict[str, float]:
    """The engine's messages to the API process, 64 requests per step."""
    from penstock.engine import messages

    scheduler = make_scheduler(64, 640, 64 * 40 + 1)
    for number in range(64):
        scheduler.add(make_request(number, [5] * 20, 600))
    costs: dict[str, list[float]] = {"encode": [], "decode": []}
    for _ in range(300):
        deltas = scheduler.update(answer(scheduler.schedule()))
        begin = time.thread_time_ns()
        frame = messages.encode(messages.Outputs(deltas))
        costs["encode"].append(1e-3 * (time.thread_time_ns() - begin) / 64)
        begin = time.thread_time_ns()
        messages.decode_message(frame)
        costs["decode"].append(1e-3 * (time.thread_time_ns() - begin) / 64)
    return {f"outputs, {name}: us a token": statistics.median(all_) for name, all_ in costs.items()}


# -- all of it

PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "steps": measure_steps,
    "aborts": measure_aborts,
    "admission": measure_admission,
    "messages": measure_messages,
    "api": measure_api,
    "apis": measure_several_apis,
}


def measure_elsewhere(part: str, checkout: Path) -> dict[str, float]:
    """One part, in a separate process that runs the code of a checkout."""
    done = subprocess.run(
        [sys.executable, __file__, "--part", part],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    costs: dict[str, float] = json.loads(done.stdout)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compare", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part]()))
        return
    checkouts = {"here": Path(__file__).parents[1]}
    if args.compare:
        checkouts = {"there": args.compare.resolve(), **checkouts}
    costs: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.rounds):
        for part in args.parts:
            for column, checkout in checkouts.items():
                for name, cost in measure_elsewhere(part, checkout).items():
                    costs.setdefault(name, {}).setdefault(column, []).append(cost)
    if args.json:
        args.json.write_text(json.dumps(costs, indent=1))
    print(f"| | {' | '.join(checkouts)} |\n|---|{'---|' * len(checkouts)}")
    for name, columns in costs.items():
        medians = [statistics.median(columns[column]) for column in checkouts]
        print(f"| {name} | {' | '.join(f'{median:.2f}' for median in medians)} |")


if __name__ == "__main__":
    main()
