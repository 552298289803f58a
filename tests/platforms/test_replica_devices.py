"""The GPUs and cores that a replica uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.config import DeviceConfig, EngineConfig
from penstock.engine import replicas
from penstock.engine.replicas import check_cores
from penstock.platforms import cores
from penstock.platforms.cores import threads_of_replica
from penstock.platforms.platform import _gpu_of
from penstock.protocol.errors import ConfigError

BIND = """
import os, sys
from penstock.config import DeviceConfig
from penstock.platforms.platform import detect_platform
found = detect_platform(DeviceConfig(device="cpu", device_ids=(int(sys.argv[1]),), num_replicas=99))
print(os.sched_getaffinity(0), found.cpu_threads)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_replica_runs_on_its_cores_with_a_thread_for_each() -> None:
    core = max(os.sched_getaffinity(0))
    ended = subprocess.run(
        [sys.executable, "-c", BIND, str(core)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split("\n")[0] == f"{ {core} } 1"


def test_ranks_use_the_gpus_of_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert _gpu_of(DeviceConfig(first_gpu=2), rank=1) == 3
    assert _gpu_of(DeviceConfig(device_ids=(3, 1)), rank=1) == 1
    with pytest.raises(ConfigError, match="GPU 4 is needed, but there are only 4: lower data_para"):
        _gpu_of(DeviceConfig(first_gpu=4), rank=0)
    with pytest.raises(ConfigError, match="too few for its ranks"):
        _gpu_of(DeviceConfig(device_ids=(3,)), rank=1)


def test_replicas_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    assert [threads_of_replica(num) for num in (1, 2, 3, 8)] == [8, 4, 2, 1]
    assert threads_of_replica(2, ranks=2) == 2
    with pytest.raises(ConfigError, match=r"9 replicas \(data_parallel_size\) are more than the 8"):
        threads_of_replica(9)


def test_too_many_replicas_are_refused_before_they_start_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    monkeypatch.setattr(replicas, "GPU_DEVICES", (tmp_path / "gpu",))
    config = EngineConfig.from_options({"data_parallel_size": 9})
    with pytest.raises(ConfigError, match="more than the 8 cores here"):
        check_cores(config)
    (tmp_path / "gpu").touch()
    check_cores(config)  # engines know how many there are
