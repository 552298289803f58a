"""A rank of an engine is killed under streams: the group restarts, and every answer is whole."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from faults.streams import Body, Streams
from server_process import ServerProcess, children_of
from structured.byte_model import VOCAB_SIZE, make_byte_tokenizer
from tiny_models import make_checkpoint

SEEDED: Body = {"prompt": "Once", "max_tokens": 150, "seed": 1, "temperature": 0.9}
KINDS: list[Body] = [
    {"prompt": "One, two,", "max_tokens": 150, "temperature": 0, "ignore_eos": True},
    {**SEEDED, "ignore_eos": True, "n": 2},
    {**SEEDED, "ignore_eos": True, "logprobs": 2},
    {**SEEDED, "structured_outputs": {"regex": "([a-z]{3} )*"}},
]
FLAGS = ["--cpu-threads", "1", "--kv-cache-memory-bytes", str(16 << 20), "--max-model-len", "256"]


def make_model(folder: Path) -> Path:
    model = make_checkpoint(folder, "llama", vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    make_byte_tokenizer().save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    return model


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [["-pp", "2"], ["-tp", "2"]], ids="".join)
def test_kills_of_single_ranks_change_nothing(ranks: list[str], tmp_path: Path) -> None:
    model = make_model(tmp_path)
    with ServerProcess(str(model), *FLAGS, *ranks) as server:
        calm = Streams(server).run(KINDS)
        assert all(answer.error is None and answer.num_ends == 1 for answer in calm)

        async def kill_each(streams: Streams) -> None:
            for rank in range(2):
                enough = streams.num_tokens + 60
                await streams.until(lambda: streams.num_tokens >= enough)  # noqa: B023
                engine = server.engine_pid
                os.kill(sorted(children_of(engine))[rank], signal.SIGKILL)
                await streams.until(lambda: server.engine_pids() not in ({engine}, set()))  # noqa: B023
                async with httpx.AsyncClient(base_url=server.base_url, timeout=120) as client:
                    while (await client.get("/health")).status_code != 200:
                        await asyncio.sleep(0.05)

        streams = Streams(server)
        for answers, undisturbed in zip(streams.run_during(KINDS, kill_each), calm, strict=True):
            assert all(answer == undisturbed for answer in answers)
        restarts = [
            line for line in server.get("/metrics").text.splitlines() if "restarts_total" in line
        ]
        assert any(line.endswith(" 2.0") for line in restarts), restarts
