"""`penstock serve` in a real process, and a tiny model that starts and answers quickly."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from waiting import eventually

if TYPE_CHECKING:
    import openai

START_TIMEOUT_S = 300.0
# For models that are tiny, and servers that nobody kills.
SMALL = ("--kv-cache-memory-bytes", "64MiB", "--cpu-threads", "1", "--no-spare-engine")
DUMMY = ("--load-format", "dummy", *SMALL)
PATIENT = ("--stream-start-timeout-s", "600", "--stream-keep-alive-s", "600")
# Reading the certificates of all authorities takes longer than most requests.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class ServerProcess:
    """A running server. `base_url` and `client()` say how to reach it.

    Its streams wait for their first token, so that what they answer does not depend on the speed.
    """

    def __init__(
        self,
        *flags: str,
        uds: Path | None = None,
        tls_ca: Path | None = None,
        env: Mapping[str, str] | None = None,
        log_to: Path | None = None,
        banner_to: Path | None = None,
        max_open_files: int | None = None,
    ) -> None:
        self.uds = uds
        self.tls_ca = tls_ca
        where = ["--uds", str(uds)] if uds else ["--host", "127.0.0.1", "--port", "0"]
        limited = ["prlimit", f"--nofile={max_open_files}"] if max_open_files else []
        with contextlib.ExitStack() as stack:
            self.process = subprocess.Popen(
                [*limited, sys.executable, "-m", "penstock", "serve", *PATIENT, *where, *flags],
                stdout=stack.enter_context(banner_to.open("w")) if banner_to else subprocess.PIPE,
                stderr=stack.enter_context(log_to.open("w")) if log_to else subprocess.PIPE,
                text=True,
                env=environment(env or {}),
            )
        self.log: list[str] = []
        self._log_reader = threading.Thread(
            target=self.log.extend, args=(self.process.stderr or (),), daemon=True
        )
        self._log_reader.start()
        if banner_to is None:
            self._read_banner()
            told = "".join(self.banner)
        else:
            eventually(lambda: any("Serving at" in line for line in self.log), START_TIMEOUT_S)
            told = "".join(self.log)
        found = re.search(r"://127\.0\.0\.1:(\d+)", told)
        self.port = int(found[1]) if found else 0
        self.base_url = f"{'https' if tls_ca else 'http'}://localhost:{self.port}"

    def _read_banner(self) -> None:
        assert self.process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, self.process.kill)
        timer.start()
        self.banner = [self.process.stdout.readline() for _ in range(4)]
        timer.cancel()
        assert "page" in self.banner[-1], "".join(self.log)

    def client(self, **options: Any) -> httpx.Client:
        if self.uds:
            options["transport"] = httpx.HTTPTransport(verify=self._verify, uds=str(self.uds))
        return httpx.Client(base_url=self.base_url, timeout=240, verify=self._verify, **options)

    def async_client(self, **options: Any) -> httpx.AsyncClient:
        if self.uds:
            options["transport"] = httpx.AsyncHTTPTransport(verify=self._verify, uds=str(self.uds))
        return httpx.AsyncClient(base_url=self.base_url, verify=self._verify, **options)

    @property
    def _verify(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.tls_ca)) if self.tls_ca else NO_TLS

    def openai(self) -> openai.OpenAI:
        """OpenAI's own client, which tries nothing twice."""
        import openai  # slow, and few need it

        return openai.OpenAI(
            base_url=f"{self.base_url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=self._verify),
        )

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    @property
    def engine_pid(self) -> int:
        """The engine; waits for it while the server starts another."""
        eventually(lambda: len(self.engine_pids()) == 1)
        (pid,) = self.engine_pids()
        return pid

    def engine_pids(self) -> set[int]:
        """Children that have, or load, a model: a spare engine does not."""
        return engines_of(self.process.pid)

    @contextlib.contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """Nothing is computed meanwhile; far shorter than the engine may be silent."""
        pid = self.engine_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # its server may have ended it
                os.kill(pid, signal.SIGCONT)

    def child_pids(self) -> set[int]:
        return children_of(self.process.pid)

    def has_logged(self, text: str) -> bool:
        return any(text in line for line in self.log)

    def is_idle(self) -> bool:
        load = self.get("/load").json()
        replicas = load.pop("replicas")
        return not any(load.values()) and not any(item["server_load"] for item in replicas)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """How it ended; `log` is complete then."""
        code = self.process.wait(120)
        self._log_reader.join(120)
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def start_scripted(folder: Path, *flags: str, name: str = "scripted") -> ServerProcess:
    """A server of the model in `folder`, which says what it is told (`scripted.py`)."""
    return ServerProcess(
        str(folder),
        *DUMMY,
        *("--logits-processors", "scripted:Script", "--served-model-name", name, *flags),
        env={"PYTHONPATH": str(Path(__file__).parent)},
    )


def refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A server that does not start, and leaves no process behind."""
    mark = f"STARTED_BY={uuid.uuid4()}"  # in the environment of all that it starts
    ended = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", *arguments],
        env=environment(dict([mark.split("=")])),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    eventually(lambda: not any(mark.encode() in block for block in environments()))
    return ended


def environments() -> Iterator[bytes]:
    """Of all processes that run now."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            yield path.read_bytes()


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's with more in it; folders of modules come on top of those that it has.

    Output is buffered, as users have it.
    """
    paths = [each["PYTHONPATH"] for each in (more, os.environ) if each.get("PYTHONPATH")]
    path = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**own, **more, **path}


def children_of(pid: int) -> set[int]:
    pids: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may end meanwhile
            pids |= {int(child) for child in (task / "children").read_text().split()}
    return pids


def engines_of(pid: int) -> set[int]:
    return {child for child in children_of(pid) if name_of(child) == "penstock-engine"}


def name_of(pid: int) -> str:
    """As top shows it; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def events(text: str) -> list[Any]:
    """The events of a stream, ``[DONE]`` as it stands."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def make_tiny_model(folder: Path) -> Path:
    """A configuration for dummy weights, and a tokenizer with a token for every byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "eos_token_id": 256,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return folder
