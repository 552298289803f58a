"""Mixed traffic on a server whose engine is killed, stopped, hung and poisoned, then an audit.

    python tests/chaos.py --seconds 1200                  # a soak of twenty minutes
    python tests/chaos.py --seconds 1200 --no-faults      # the same traffic, on one engine
    python tests/chaos.py --seconds 300 --model default   # on the real default model
    python tests/chaos.py --seconds 600 --replicas 3      # with three engines

Every answer is compared with that of a calm run. The exit code is 0 if every request ended exactly
once, with the right answer or the error that it deserves, nothing was left in the engine, and
neither memory nor file descriptors grew. A process's memory counts where it lived long enough to be
judged. A picture shows all over time.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "server"))
from faults.saboteur import Fault, saboteur_options, seed_of
from faults.streams import Body, Streams
from faults.tiny_checkpoint import make_tiny_checkpoint
from server_process import ServerProcess
from waiting import eventually

from penstock.config.model import DEFAULT_MODEL

SETTLE_TIMEOUT_S = 120.0
WARM_UP_SHARE = 0.2  # of the run, in which memory may grow
MAX_GROWTH_SHARE = 0.05  # of memory, after the warm-up
MAX_GROWTH_BYTES = 16 * 2**20  # less than this is noise
MIN_LIFE_S = 60.0  # of a process whose memory is judged
MAX_MORE_FDS = 24  # a spare engine, which may be there or not, has a dozen

INVALID: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}),
    ("/v1/completions", {"prompt": "x" * 100_000}),
    ("/v1/completions", {"prompt": [2**40]}),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ("/v1/chat/completions", "no object"),
    ("/v1/completions", {"model": "no such model", "prompt": "x"}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(a"}}),
    ("/nowhere", {}),
]

JSON = {
    "name": "point",
    "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
}


def good_requests() -> list[Body]:
    """One of each kind; their calm answers are what all later ones are held to."""
    seeded: Body = {"prompt": "Once upon", "max_tokens": 40, "seed": 1, "temperature": 0.9}
    chat: Body = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 32}
    return [
        {"prompt": "One, two,", "max_tokens": 60, "temperature": 0, "ignore_eos": True},
        seeded,
        {**seeded, "n": 3, "seed": 2},
        {**seeded, "logprobs": 2, "seed": 3},
        {**seeded, "repetition_penalty": 1.2, "presence_penalty": 0.5, "seed": 4},
        {**seeded, "min_tokens": 10, "stop": ["a", "e"], "seed": 5},
        {**seeded, "prompt": "long " * 40, "seed": 6, "max_tokens": 48, "ignore_eos": True},
        {**seeded, "prompt": "long " * 35, "prompt_logprobs": 1, "seed": 7},
        {**chat, "seed": 8, "temperature": 1.0},
        {**chat, "temperature": 0, "logprobs": True, "top_logprobs": 2},
        {**seeded, "structured_outputs": {"regex": "([a-z]{3} )*"}, "seed": 9},
        {**chat, "seed": 10, "response_format": {"type": "json_schema", "json_schema": JSON}},
    ]


@dataclass
class Audit:
    """How every request ended, and what the processes looked like meanwhile."""

    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    complaints: list[str] = field(default_factory=list)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    server: Life = field(default_factory=lambda: Life())
    engines: dict[int, Life] = field(default_factory=dict)  # by pid
    num_fds: list[int] = field(default_factory=list)  # of the server

    def complain(self, what: str) -> None:
        self.complaints.append(what)

    def look(self, time_s: float, server_rss: int, engines: dict[int, int], num_fds: int) -> None:
        """Note the size of the server and, by their pids, those of the engines."""
        self.server.add(time_s, server_rss)
        for pid, rss in engines.items():
            self.engines.setdefault(pid, Life()).add(time_s, rss)
        self.num_fds.append(num_fds)

    def memory(self) -> dict[str, Growth]:
        """How the memory of each process grew that lived long enough."""
        lives = {"server": self.server}
        lives |= {f"engine {pid}": life for pid, life in self.engines.items()}
        return {whose: life.growth() for whose, life in lives.items() if life.is_long}

    def check_process(self, num_fds_before: int, num_fds_after: int) -> None:
        for whose, grown in self.memory().items():
            if grown.num_bytes > MAX_GROWTH_BYTES and grown.share > MAX_GROWTH_SHARE:
                self.complain(f"the {whose}'s memory grew: {grown}")
        if num_fds_after > num_fds_before + MAX_MORE_FDS:
            self.complain(f"file descriptors: {num_fds_before} before, {num_fds_after} after")

    def check_log(self, lines: list[str]) -> None:
        for number, line in enumerate(lines):
            if "Traceback" in line:
                around = "".join(lines[max(number - 5, 0) : number + 60])
                self.complain(f"a traceback in the log:\n{around}")

    def report(self) -> str:
        memory = "; ".join(f"{whose} {grown}" for whose, grown in self.memory().items())
        lines = [
            f"requests  {dict(self.ends)}",
            f"faults    {dict(self.faults)}",
            f"engines   {len(self.engines)}",
            f"memory    {memory}",
            f"files     {min(self.num_fds)} to {max(self.num_fds)} descriptors",
            f"verdict   {'FAILED' if self.complaints else 'all right'}",
        ]
        return "\n".join(lines + [f"  {what}" for what in self.complaints[:20]])

    def plot(self, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 6), layout="constrained")
        memory, files = figure.subplots(2, 1, sharex=True)
        memory.plot(self.server.times_s, np.array(self.server.rss) / 2**20, label="server")
        for pid, life in self.engines.items():
            memory.plot(life.times_s, np.array(life.rss) / 2**20, alpha=0.4, label=f"engine {pid}")
        memory.set_ylabel("resident memory, MiB")
        if len(self.engines) < 10:
            memory.legend()
        files.plot(self.server.times_s, self.num_fds)
        files.set_ylabel("server's file descriptors")
        files.set_xlabel("seconds")
        figure.savefig(path, dpi=120)


@dataclass
class Growth:
    """Of a process's memory, after the warm-up."""

    num_bytes: float
    share: float
    last: int  # how large it is at the end

    def __str__(self) -> str:
        grown = f"{self.num_bytes / 2**20:+.1f} MiB, {100 * self.share:+.1f} %"
        return f"{self.last / 2**20:.1f} MiB ({grown})"


@dataclass
class Life:
    """Of a process: how large it was at which times."""

    times_s: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)

    def add(self, time_s: float, rss: int) -> None:
        self.times_s.append(time_s)
        self.rss.append(rss)

    @property
    def is_long(self) -> bool:
        """Whether its memory can be judged."""
        return bool(self.times_s) and self.times_s[-1] - self.times_s[0] >= MIN_LIFE_S

    def growth(self) -> Growth:
        """By the slope of a straight line: the last size alone may be a peak or a valley."""
        start = int(len(self.times_s) * WARM_UP_SHARE)
        times, rss = np.array(self.times_s[start:]), np.array(self.rss[start:])
        if len(times) < 3:
            return Growth(0.0, 0.0, self.rss[-1])
        grown = float(np.polyfit(times, rss, 1)[0]) * float(times[-1] - times[0])
        return Growth(grown, grown / float(rss[0]), self.rss[-1])


class Chaos:
    def __init__(
        self,
        server: ServerProcess,
        seconds: float,
        num_clients: int,
        seed: int,
        faults: bool,
        num_replicas: int,
    ) -> None:
        self.audit = Audit()
        self._server = server
        self._draw = random.Random(seed)
        self._seconds = seconds
        self._started = self._deadline = 0.0
        self._num_clients = num_clients
        self._has_faults = faults
        self._num_replicas = num_replicas
        self._bodies = good_requests()
        self._streams = Streams(server, timeout_s=300)
        self._calm = [dataclasses.asdict(answer) for answer in self._streams.run(self._bodies)]
        for body, answer in zip(self._bodies, self._calm, strict=True):
            assert answer["error"] is None, (body, answer["error"])

    @property
    def is_over(self) -> bool:
        """After its time, once a request has ended well and a fault has happened."""
        has_begun = self.audit.ends["right"] and (self.audit.faults or not self._has_faults)
        return time.monotonic() > self._deadline and bool(has_begun)

    def run(self) -> None:
        eventually(self._server.is_idle)
        num_fds_before = count_fds(self._server.process.pid)
        self._started = time.monotonic()
        self._deadline = self._started + self._seconds
        asyncio.run(self._run())
        try:
            eventually(self._server.is_idle, SETTLE_TIMEOUT_S)
        except AssertionError:
            self.audit.complain(f"left over in the engine: {self._server.get('/load').json()}")
        pid, most = self._server.process.pid, num_fds_before + MAX_MORE_FDS
        with contextlib.suppress(AssertionError):  # connections may still be closing
            eventually(lambda: count_fds(pid) <= most, SETTLE_TIMEOUT_S)
        self.audit.check_process(num_fds_before, count_fds(pid))

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._server.base_url, limits=limits, timeout=300
        ) as client:
            clients = [self._be_a_client(client) for _ in range(self._num_clients)]
            if self._has_faults:
                clients.append(self._be_fate(client))
            await asyncio.gather(*clients, self._look())

    # -- traffic

    async def _be_a_client(self, client: httpx.AsyncClient) -> None:
        kinds: list[tuple[float, Callable[[httpx.AsyncClient], Awaitable[str]]]] = [
            (0.6, self._good),
            (0.15, self._aborted),
            (0.23, self._invalid),
            (0.02 * self._has_faults, self._poisonous),
        ]
        weights = [weight for weight, _ in kinds]
        while not self.is_over:
            ((_, kind),) = self._draw.choices(kinds, weights)
            try:
                self.audit.ends[await kind(client)] += 1
            except (httpx.HTTPError, ValueError, AssertionError, KeyError) as error:
                self.audit.ends["lost"] += 1
                self.audit.complain(f"{kind.__name__}: {error!r}")

    async def _good(self, client: httpx.AsyncClient) -> str:
        index = self._draw.randrange(len(self._bodies))
        answer = await self._streams.stream(client, self._bodies[index])
        if dataclasses.asdict(answer) == self._calm[index]:
            return "right"
        differing = differences(dataclasses.asdict(answer), self._calm[index])
        self.audit.complain(f"request {index} got another answer: {differing[:5]}"[:2000])
        return "wrong"

    async def _aborted(self, client: httpx.AsyncClient) -> str:
        body = {**self._draw.choice(self._bodies), "stream": True}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        num_lines = self._draw.randrange(20)
        async with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.status_code
            async for _ in response.aiter_lines():
                num_lines -= 1
                if num_lines < 0:
                    break
        return "left"

    async def _invalid(self, client: httpx.AsyncClient) -> str:
        path, body = self._draw.choice(INVALID)
        response = await client.post(path, content=json.dumps(body))
        assert 400 <= response.status_code < 500, (path, response.status_code, response.text[:500])
        assert response.json()["error"]["message"]
        await asyncio.sleep(0.05)
        return "refused"

    async def _poisonous(self, client: httpx.AsyncClient) -> str:
        fault = self._draw.choice([Fault.KILL, Fault.ABORT])
        seed = seed_of(fault, self._draw.choice([0, 1, 7]))
        body = {"prompt": "poison", "max_tokens": 10, "seed": seed, "ignore_eos": True}
        answer = await self._streams.stream(client, body)
        assert answer.error is not None, "poison did no harm"
        assert answer.error["code"] == 500, answer.error
        assert "crashed the engine" in answer.error["message"]
        self.audit.faults["poison"] += 1
        return "poison found"

    # -- fate

    async def _be_fate(self, client: httpx.AsyncClient) -> None:
        while not self.is_over:
            # Mostly at an engine that runs, now and then at one that has yet to start: one that
            # never comes to life proves nothing.
            if self._draw.random() < 0.9:
                await self._be_healthy(client)
            await asyncio.sleep(self._draw.uniform(0.5, 6.0))
            what = self._draw.choice(["kill", "kill", "stop", "pause"])
            pids = sorted(self._server.engine_pids())
            if not 0 < len(pids) <= self._num_replicas:
                continue  # between two engines
            self.audit.faults[what] += 1
            pid = self._draw.choice(pids)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                if what == "pause":
                    await asyncio.sleep(0.7)
                    os.kill(pid, signal.SIGCONT)

    async def _be_healthy(self, client: httpx.AsyncClient) -> None:
        while (await client.get("/health")).status_code != 200 and not self.is_over:
            await asyncio.sleep(0.1)

    async def _look(self) -> None:
        while not self.is_over:
            await asyncio.sleep(0.5)
            pid, elapsed_s = self._server.process.pid, time.monotonic() - self._started
            engines = {engine: resident_bytes(engine) for engine in self._server.engine_pids()}
            living = {engine: rss for engine, rss in engines.items() if rss}
            self.audit.look(elapsed_s, resident_bytes(pid), living, count_fds(pid))


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two values differ, and how."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        return [d for key in found for d in differences(found[key], expected[key], f"{path}.{key}")]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [d for i, (ours, theirs) in pairs for d in differences(ours, theirs, f"{path}[{i}]")]
    return [] if found == expected else [f"{path}: {found!r}, not {expected!r}"]


def resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def count_fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def run_chaos(
    model: str,
    seconds: float,
    num_clients: int,
    seed: int,
    picture: Path,
    faults: bool = True,
    num_replicas: int = 1,
) -> Audit:
    """Start a server, torment it, audit it."""
    with tempfile.TemporaryDirectory() as folder:
        # Little: memory of the cache counts from its first use on, and all of it is soon used.
        cache = "16MiB" if model == "tiny" else "256MiB"
        if model == "tiny":
            model = str(make_tiny_checkpoint(Path(folder)))
        flags, options = saboteur_options(Path(folder) / "flag")
        server = ServerProcess(
            DEFAULT_MODEL if model == "default" else model,
            *("--kv-cache-memory-bytes", cache, "--cpu-threads", "1"),
            *("--engine-heartbeat-timeout-s", "4", "--step-timeout-s", "60"),
            *("--max-request-crashes", "2", "--max-engine-failures", "20", *flags),
            *("--data-parallel-size", str(num_replicas)),
            **options,
        )
        try:
            chaos = Chaos(server, seconds, num_clients, seed, faults, num_replicas)
            chaos.run()
            if (code := server.stop()) != 0:
                chaos.audit.complain(f"the server ended with code {code}")
            chaos.audit.check_log(server.log)
        finally:
            server.close()
    chaos.audit.plot(picture)
    return chaos.audit


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", default="tiny", help="tiny, default, or any model")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, default=Path("chaos.png"))
    parser.add_argument("--faults", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--replicas", type=int, default=1)
    args = parser.parse_args()
    audit = run_chaos(
        args.model, args.seconds, args.clients, args.seed, args.picture, args.faults, args.replicas
    )
    print(audit.report())
    return 1 if audit.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
