"""Memory over very many pooled texts, offline and behind the server."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import DUMMY, ServerProcess

from penstock import LLM

NUM_TEXTS = 100_000
BATCH = 1_000
KV_BYTES = 4 << 20  # all of it is in use after a few batches
ALLOWED_MIB = 24.0  # of what allocators keep; a kilobyte kept of each text would be 75 MiB


def texts(start: int) -> list[str]:
    """Texts of many lengths, no two of them the same."""
    return [f"{index} " + "word " * (index % 20) for index in range(start, start + BATCH)]


def resident_mib(pids: set[int]) -> float:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def batches() -> Iterator[tuple[list[str], bool]]:
    """All texts, and whether this batch is the last that warms up."""
    for start in range(0, NUM_TEXTS, BATCH):
        yield texts(start), start + BATCH == NUM_TEXTS // 4


@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_thousand_texts(tiny_model: Path) -> None:
    options = {"load_format": "dummy", "cpu_threads": 1, "kv_cache_memory_bytes": KV_BYTES}
    before = None
    with LLM(str(tiny_model), runner="pooling", log_level="error", **options) as llm:
        for batch, is_warm in batches():
            outputs = llm.embed(batch, use_tqdm=False)
            assert all(output.error is None for output in outputs)
            del outputs
            if is_warm:
                gc.collect()
                before = resident_mib({os.getpid()})
        gc.collect()
        assert before is not None
        assert resident_mib({os.getpid()}) - before < ALLOWED_MIB


@pytest.mark.slow
def test_memory_of_a_server_is_flat_over_a_hundred_thousand_texts(tiny_model: Path) -> None:
    before = None
    flags = (*DUMMY, "--kv-cache-memory-bytes", str(KV_BYTES), "--runner", "pooling")
    with contextlib.closing(ServerProcess(str(tiny_model), *flags)) as server:
        pids = {server.process.pid, server.engine_pid}
        for batch, is_warm in batches():
            body = {"input": batch, "encoding_format": "base64"}
            response = server.post("/v1/embeddings", body)
            assert response.status_code == 200, response.text
            if is_warm:
                before = resident_mib(pids)
        assert before is not None
        assert resident_mib(pids) - before < ALLOWED_MIB
