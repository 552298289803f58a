"""The API process's part of `host_cost.py`, which is its engine and its clients.

The server serves the default model's text, with a fake engine in the process that measures.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STREAMS = (1, 64, 512)
PROMPT_CHARACTERS = 2000  # of requests for one token: some 430 tokens
NUM_STRETCHES = 15  # of streams: the cheapest counts, since what else the machine does only adds


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
        command = [sys.executable, __file__, uds, str(num_processes)]
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


if __name__ == "__main__":
    run_api(sys.argv[1], int(sys.argv[2]))
