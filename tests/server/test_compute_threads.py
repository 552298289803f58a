"""Two pools of threads must not fight for a server's cores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from server_process import ServerProcess
from waiting import eventually

PROBE = """
import torch
from penstock.runner.logits_processors import LogitsProcessor

class Probe(LogitsProcessor):
    def add(self, slot, request):
        return True

    def apply(self, logits, rows):
        # Where the engine steps: a thread of its own would be asked in vain.
        raise RuntimeError(f"torch computes with {torch.get_num_threads()} threads")
"""


def test_torch_computes_with_one_thread_where_the_library_has_several(
    serve_tiny: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    (tmp_path / "thread_probe.py").write_text(PROBE)
    server = serve_tiny(
        "--cpu-threads", "3", "--logits-processors", "thread_probe:Probe",
        env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "4"},
    )  # fmt: skip
    answer = server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2})
    told = "torch computes with 1 threads"
    eventually(lambda: told in answer.text or server.has_logged(told))
