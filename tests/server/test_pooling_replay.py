"""Vectors whose engine dies in the middle of their prompt."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults.points import FaultPoints
from server_process import DUMMY, ServerProcess

STEP_END = "penstock.scheduler.scheduler:Scheduler.update"
TEXTS = ["a text of many chunks, " * 10, "one", "another"]


@pytest.mark.parametrize(
    "kind", ["MEAN", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("CLS", "LAST"))]
)
def test_vectors_are_the_same_after_a_kill_between_chunks_of_a_prompt(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    points = FaultPoints(tmp_path, STEP_END)
    flags = (
        *("--runner", "pooling", "--pooler-config", json.dumps({"pooling_type": kind})),
        *("--max-num-batched-tokens", "16", "--max-num-seqs", "4"),
        *("--no-enable-prefix-caching", "--engine-heartbeat-timeout-s", "600"),
    )
    with ServerProcess(str(tiny_model), *DUMMY, *flags, env=points.env) as server:

        def embed() -> list[list[float]]:
            response = server.post("/v1/embeddings", {"input": TEXTS})
            assert response.status_code == 200, response.text
            return [item["embedding"] for item in response.json()["data"]]

        calm, engine = embed(), server.engine_pid
        points.stall_at(STEP_END, 3600)  # with the first chunk computed, and 14 to come
        with ThreadPoolExecutor(1) as threads:
            replayed = threads.submit(embed)
            points.wait_for(STEP_END)
            os.kill(engine, signal.SIGKILL)
            assert replayed.result() == calm
        assert server.engine_pid != engine
