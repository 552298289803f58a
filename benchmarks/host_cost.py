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
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
NUM_IN_FLIGHT = 2  # as on a GPU
RUNNING = (10, 100, 1000, 4000)
LONG_PROMPT = 128 * 1024
STREAMS = (1, 64, 512)
PROMPT_CHARACTERS = 2000  # of requests for one token: some 430 tokens
NUM_STRETCHES = 15  # of streams: the cheapest counts, since what else the machine does only adds


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


# -- the API process: this process is its engine and its clients, and looks at its CPU time


def run_api(uds: str, num_processes: int) -> None:
    """Serve the default model's text, with a fake engine in another process."""
    import penstock.engine.handle as handle
    from penstock.cli.serve import run_in_event_loop
    from penstock.config import EngineConfig, ServerConfig
    from penstock.server.run import serve

    class EngineElsewhere(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            if "penstock.engine.process" in command[2]:
                print(f"engine {command[-2]}", flush=True)
                command = ["sleep", "100000"]
            super().__init__(command, **options)

    handle.subprocess.Popen = EngineElsewhere  # type: ignore[misc]
    never = 1e6
    several = {"api_server_count": num_processes} if num_processes > 1 else {}
    server_config = ServerConfig(
        uds=uds,
        spare_engine=False,
        engine_heartbeat_timeout_s=never,
        step_timeout_s=never,
        **several,
    )
    run_in_event_loop(serve(EngineConfig(), server_config))


class FakeEngine:
    """Stands in for an engine: `step` sends one token for every request received."""

    def __init__(self, address: str, token_ids: list[int]) -> None:
        import msgspec
        import zmq

        from penstock.engine import messages
        from penstock.protocol.limits import StepLimits
        from penstock.protocol.request import EngineRequest

        self._messages = messages
        self._decode = msgspec.msgpack.Decoder(EngineRequest).decode
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)
        self._token_ids = token_ids
        self._num_steps = 0
        self.request_ids: list[str] = []
        self._send(messages.Connected())
        assert self._socket.recv_multipart()[0] == messages.LOAD
        limits = StepLimits(max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192)
        self._send(messages.Ready(messages.EngineInfo(limits, num_kv_blocks=10_000)))

    def _send(self, answer: Any) -> None:
        self._socket.send(self._messages.encode(answer))

    def wait_for(self, num_requests: int) -> None:
        self.request_ids = []
        while len(self.request_ids) < num_requests:
            kind, *frames = self._socket.recv_multipart()
            if kind == self._messages.ADD:
                self.request_ids.append(self._decode(frames[1]).request_id)

    def step(self, is_last: bool = False) -> None:
        from penstock.protocol.delta import EngineDelta, FinishReason

        token_id = self._token_ids[self._num_steps % len(self._token_ids)]
        self._num_steps += 1
        reason = FinishReason.LENGTH if is_last else None
        deltas = [
            EngineDelta(request_id=name, token_ids=[token_id], finish_reason=reason)
            for name in self.request_ids
        ]
        self._send(self._messages.Outputs(deltas))


class Client:
    """One stream over its own socket."""

    def __init__(self, uds: str, path: str, body: dict[str, Any]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(uds)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    def read_event(self) -> bytes:
        return self._socket.recv(2**16)

    def close(self) -> None:
        self._socket.close()


def cpu_time(pid: int) -> float:
    """CPU seconds of a process; the clock ID is Linux's encoding of its PID."""
    return time.clock_gettime((~pid << 3) | 2)


def api_pids(pid: int) -> list[int]:
    """The processes of a server that serve the API: itself and, if there are several, these."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    pids = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    names = {child: Path(f"/proc/{child}/comm").read_text().strip() for child in pids}
    return [pid, *(child for child in pids if names[child] == "penstock-api")]


def measure_several_apis() -> dict[str, float]:
    """Streams with two API processes, whose CPU time is added up."""
    return measure_api(num_processes=2)


def measure_api(num_processes: int = 1) -> dict[str, float]:
    import tempfile

    from penstock.config import EngineConfig
    from penstock.loading.source import resolve_source
    from penstock.text.frontend import Frontend

    config = EngineConfig()
    source = resolve_source(config.model, config.load)
    tokenizer = Frontend(config.model, source, 8192, chat=config.chat).tokenizer
    assert tokenizer is not None
    text = (Path(__file__).parents[1] / "LICENSE").read_text()[2000:12_000]
    token_ids = [i for i in tokenizer.encode(text) if tokenizer.token_text(i).strip()]
    with tempfile.TemporaryDirectory() as folder:
        uds = f"{folder}/api"
        command = [sys.executable, __file__, "--serve", uds, str(num_processes)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            address = process.stdout.readline().split()[1]
            engine = FakeEngine(address, token_ids)
            for line in process.stdout:
                if "page" in line:
                    break
            pids = api_pids(process.pid)
            if num_processes > 1:
                return measure_shares(engine, pids, uds)
            streams = {
                f"{name} stream, {num_streams} at once: us of the API process a token": (
                    measure_streams(engine, pids, uds, name, num_streams)
                )
                for name in ("chat", "completions")
                for num_streams in STREAMS
            }
            request = measure_requests(engine, pids, uds, text[:PROMPT_CHARACTERS])
            name = "chat request for one token, 64 at once: us of the API process a request"
            return {**streams, name: request}
        finally:
            process.kill()
            process.wait()


def measure_shares(engine: FakeEngine, pids: list[int], uds: str) -> dict[str, float]:
    """What the parent and an API process spend on chat streams, a token of the server."""
    costs = {}
    for num_streams in STREAMS[1:]:
        for whose, some in (("the parent", pids[:1]), ("all processes", pids)):
            name = f"chat stream, {num_streams} at once, 2 API processes: us of {whose} a token"
            costs[name] = measure_streams(engine, some, uds, "chat", num_streams)
    return costs


def measure_streams(
    engine: FakeEngine, pids: list[int], uds: str, name: str, num_streams: int
) -> float:
    body: dict[str, Any] = {"stream": True, "max_tokens": 4000, "temperature": 0}
    path = "/v1/completions"
    if name == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Hello"}]
    else:
        body["prompt"] = "Hello"
    clients = [Client(uds, path, body) for _ in range(num_streams)]
    engine.wait_for(num_streams)

    def step() -> None:
        engine.step()
        for client in clients:
            client.read_event()

    num_warm, num_steps = (200, 100) if num_streams == 1 else (20, 6)
    for _ in range(num_warm):
        step()
    costs = []
    for _ in range(NUM_STRETCHES):
        begin = sum(map(cpu_time, pids))
        for _ in range(num_steps):
            step()
        costs.append((sum(map(cpu_time, pids)) - begin) / (num_steps * num_streams))
    engine.step(is_last=True)
    for client in clients:
        client.close()
    return 1e6 * min(costs)


def measure_requests(engine: FakeEngine, pids: list[int], uds: str, prompt: str) -> float:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": prompt}]}
    costs = []
    for _ in range(NUM_STRETCHES):
        begin = sum(map(cpu_time, pids))
        clients = [Client(uds, "/v1/chat/completions", body) for _ in range(64)]
        engine.wait_for(64)
        engine.step(is_last=True)
        for client in clients:
            client.read_event()
            client.close()
        costs.append((sum(map(cpu_time, pids)) - begin) / 64)
    return 1e6 * min(costs)


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
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run_api(args.serve[0], int(args.serve[1]))
        return
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
