"""Processes start, die and end as they should."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, events, is_running
from waiting import eventually

from penstock.config import EngineConfig
from penstock.engine import messages
from penstock.engine.async_client import AsyncEngineClient
from penstock.protocol.errors import EngineDeadError
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams

ServeTiny = Callable[..., ServerProcess]
LONG = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "n": 64, "seed": 1}


class Caller(threading.Thread):
    """A client that waits for an answer."""

    def __init__(self, server: ServerProcess, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._body = body
        self.response: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError):  # its server may be killed
            self.response = self._server.post("/v1/completions", self._body)

    def answer(self) -> httpx.Response:
        self.join(120)
        assert self.response is not None
        return self.response


def test_the_api_process_never_imports_torch(tiny_model: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from penstock.cli.main import build_parser\n"
        "from penstock.config.cli import serve_options_from_args\n"
        "from penstock.server import run\n"
        "args = build_parser().parse_args(['serve', sys.argv[1], '--load-format', 'dummy',\n"
        "    '--kv-cache-memory-bytes', '16MiB', '--port', '0'])\n"
        "announce = run.announce\n"
        "def ready(*arguments):\n"
        "    announce(*arguments)\n"
        "    print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "run.announce = ready\n"
        "import signal\n"
        "sys.exit(asyncio.run(run.serve(*serve_options_from_args(args))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_when_the_server_is_killed_the_engine_ends_too(serve_tiny: ServeTiny) -> None:
    with tempfile.TemporaryDirectory(prefix="p") as folder:  # short: sockets have short names
        server = serve_tiny(env={"TMPDIR": folder})
        assert list(Path(folder).glob("penstock-*")) == []
    engine = server.engine_pid
    with server.engine_stopped():
        Caller(server, LONG)
        eventually(lambda: not server.is_idle())
    server.process.kill()
    server.process.wait()
    eventually(lambda: not is_running(engine))


@pytest.fixture(autouse=True)
def heeds_hangups() -> Iterator[None]:
    """Servers inherit it: they heed SIGHUP though the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGTERM], pytest.param([signal.SIGHUP] * 2, marks=pytest.mark.slow)],
    ids=["SIGTERM", "SIGHUP twice"],
)
def test_signals_let_requests_finish(
    serve_tiny: ServeTiny, tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    """A terminal that closes sends SIGHUP to its foreground processes, and its shell another."""
    with socket.socket(socket.AF_UNIX) as left:  # by a killed server: its file is replaced
        left.bind(str(tmp_path / "api"))
    assert (tmp_path / "api").exists()
    server = serve_tiny("--shutdown-timeout", "600", uds=tmp_path / "api")
    engine = server.engine_pid
    body = {**LONG, "stream": True, "n": 8}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        with server.engine_stopped():
            for number in numbers:
                server.process.send_signal(number)
                eventually(lambda: server.has_logged("Shutting down"))
            refused = server.post("/v1/completions", LONG)  # over another connection
        received = events("\n".join([first, *lines]))
    assert received[-1] == "[DONE]"
    reasons = [event["choices"][0]["finish_reason"] for event in received[:-1]]
    assert reasons.count("length") == 8
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.headers["connection"] == "close"  # its next request needs another server
    assert "shutting down" in refused.json()["error"]["message"]
    assert server.wait() == 0
    assert not is_running(engine)
    assert not (tmp_path / "api").exists()


def test_a_request_that_has_not_arrived_does_not_hold_up_the_end(serve_tiny: ServeTiny) -> None:
    server = serve_tiny("--shutdown-timeout", "600")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        )
        assert server.get("/health").status_code == 200  # so that has been read, too
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert connection.recv(65536).startswith(b"HTTP/1.1 503 ")


def test_a_client_that_does_not_read_does_not_hold_up_the_end(serve_tiny: ServeTiny) -> None:
    server = serve_tiny("--shutdown-timeout", "0")
    body = {**LONG, "stream": True, "n": 64, "logprobs": 20}  # more than sockets hold
    with server.client() as client, client.stream("POST", "/v1/completions", json=body):
        eventually(server.is_idle)
        assert server.stop() == 0
    assert not server.has_logged("Traceback")


def test_requests_that_outlast_the_drain_get_an_error(serve_tiny: ServeTiny) -> None:
    server = serve_tiny("--shutdown-timeout", "0", "--stream-start-timeout-s", "0")
    with (
        server.client() as client,
        server.engine_stopped(),
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream,
    ):
        eventually(lambda: not server.is_idle())
        server.process.send_signal(signal.SIGINT)
        pieces = [line for line in stream.iter_lines() if not line.startswith(":")]
    error, done = events("\n".join(pieces))
    assert error["error"]["code"] == 503
    assert "shutting down" in error["error"]["message"]
    assert done == "[DONE]"
    assert server.wait() == 0


def test_a_server_under_nohup_outlives_its_terminal(serve_tiny: ServeTiny) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which a child inherits
    try:
        server = serve_tiny()
    finally:
        signal.signal(signal.SIGHUP, before)
    server.process.send_signal(signal.SIGHUP)
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert not server.has_logged("Shutting down")
    assert server.stop() == 0


@pytest.mark.slow
def test_unseeded_requests_do_not_repeat_after_a_restart(serve_tiny: ServeTiny) -> None:
    body = {"prompt": "x", "max_tokens": 40, "ignore_eos": True, "temperature": 1.0}

    def texts() -> list[str]:
        server = serve_tiny("--seed", "7")
        answers = [server.post("/v1/completions", {**body, **own}) for own in ({}, {"seed": 3})]
        server.stop()
        return [answer.json()["choices"][0]["text"] for answer in answers]

    (unseeded, seeded), (unseeded_again, seeded_again) = texts(), texts()
    assert unseeded != unseeded_again
    assert seeded == seeded_again


def test_a_second_signal_stops_at_once(serve_tiny: ServeTiny) -> None:
    server = serve_tiny()
    engine = server.engine_pid
    with server.engine_stopped():
        Caller(server, LONG)
        eventually(lambda: not server.is_idle())
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: server.has_logged("Shutting down"))
        assert server.stop(signal.SIGINT) == 130
    eventually(lambda: not is_running(engine))


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["no/such/folder/model.gguf"], 1, "no model at"),
        (["--max-model-len", "1000000"], 2, "max_model_len"),
        (["--ssl-keyfile", "key.pem"], 2, "ssl_certfile"),
        (["--port", "99999"], 2, "port must be"),
        (["--request-timeout-s", "0"], 2, "request_timeout_s"),
    ],
    ids=lambda value: str(value),
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    tiny_model: Path, flags: list[str], code: int, message: str
) -> None:
    model = [] if not flags[0].startswith("--") else [str(tiny_model), "--load-format", "dummy"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", "--port", "0", *model, *flags],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].startswith("penstock: error: ")
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_refused_before_anything_is_loaded(server: ServerProcess) -> None:
    flags = ["--host", "127.0.0.1", "--port", str(server.port)]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", *flags], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "cannot listen" in done.stderr


def test_a_body_that_the_engine_cannot_read_fails_one_request(tiny_model: Path) -> None:
    config = EngineConfig.from_options(
        {"model": str(tiny_model), "load_format": "dummy", "kv_cache_memory_bytes": "16MiB"}
    )

    def request(request_id: str) -> EngineRequest:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        return EngineRequest(request_id=request_id, prompt_token_ids=[1], params=params, seed=1)

    async def talk() -> None:
        client = AsyncEngineClient()
        client.spawn(config)
        await client.load(config)
        engine = client.replicas.members[0].dispatch._engine
        send = engine.send

        def damage(*frames: bytes) -> None:
            is_bad = frames[:2] == (messages.ADD, b"bad")
            send(*((*frames[:2], b"no request") if is_bad else frames))

        engine.send = damage  # type: ignore[method-assign]
        good, bad = client.submit([request("good")]), client.submit([request("bad")])
        num_tokens = 0
        async for deltas in good:
            num_tokens += sum(len(delta.token_ids) for delta in deltas)
        assert num_tokens == 8
        (failed,) = [delta async for deltas in bad for delta in deltas if delta.error]
        assert failed.request_id == "bad"
        stream = client.submit([request("cut off")])
        await client.close()  # before anything has come
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass

    asyncio.run(talk())


def test_the_banner_says_where_everything_is(server: ServerProcess) -> None:
    url = f"http://127.0.0.1:{server.port}"
    places = [line.split() for line in server.banner[1:]]
    assert places == [["API", f"{url}/v1"], ["docs", f"{url}/docs"], ["page", f"{url}/"]]
