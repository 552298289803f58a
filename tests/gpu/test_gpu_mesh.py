"""Ranks on GPUs: collectives of host tensors, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penstock.config import DeviceConfig
from penstock.platforms.platform import detect_platform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_tensor_on_the_host_is_summed_beside_those_on_a_gpu(tmp_path: Path) -> None:
    platform = detect_platform(DeviceConfig(device="cuda"))
    dist.init_process_group(
        platform.backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        for device in ("cpu", platform.device):
            x = torch.ones(3, device=device)
            dist.all_reduce(x)
            assert x.tolist() == [1.0] * 3
    finally:
        dist.destroy_process_group()
