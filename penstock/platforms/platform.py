"""Detects the device, its capabilities and the defaults that follow from them."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from penstock.config import DeviceConfig
from penstock.platforms.cores import threads_of_replica
from penstock.protocol.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Platform:
    """A device and its capabilities."""

    device: torch.device
    asynchronous: bool  # launches return before the work is complete
    default_dtype: torch.dtype | None  # None: the checkpoint's own
    max_num_seqs: int
    max_num_batched_tokens: int
    backend: str  # torch.distributed backends by device
    cpu_threads: int = 1  # threads that compute

    def available_memory(self) -> int:
        """Bytes that can be allocated now."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            return free
        return _available_host_memory()


def detect_platform(config: DeviceConfig, rank: int = 0, ranks: int = 1) -> Platform:
    """The device that `config` asks for. Raises if it is missing."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device=cuda needs a CUDA GPU and a CUDA build of torch; use device=cpu")
    if config.device == "cpu" or not has_gpu:
        _bind_to_cores(config.device_ids)
        num_replicas = 1 if config.device_ids else config.num_replicas
        threads = config.cpu_threads or threads_of_replica(num_replicas, ranks)
        torch.set_num_threads(threads)
        return Platform(torch.device("cpu"), False, torch.float32, 128, 2048, "gloo", threads)
    device = torch.device("cuda", _gpu_of(config, rank))
    torch.cuda.set_device(device)
    platform = gpu_platform(device, torch.cuda.get_device_properties(device).total_memory)
    if len(set(config.device_ids)) < len(config.device_ids):
        return replace(platform, backend="gloo")  # NCCL refuses ranks that share a GPU
    return platform


def gpu_platform(device: torch.device, memory: int) -> Platform:
    """A GPU with this much memory, which need not be there."""
    # Steps of 16,384 tokens are no faster per token (docs/contributing/gpu-kernels.md) and take
    # twice the memory.
    max_num_seqs = 1024 if memory >= 70 * GIB else 256
    return Platform(device, True, None, max_num_seqs, 8192, "cpu:gloo,cuda:nccl")


def _gpu_of(config: DeviceConfig, rank: int) -> int:
    if config.device_ids and rank >= len(config.device_ids):
        raise ConfigError(
            f"replica_devices gives a replica {len(config.device_ids)} GPUs, too few for its "
            "ranks (tensor_parallel_size): name one for each"
        )
    gpu = config.device_ids[rank] if config.device_ids else config.first_gpu + rank
    if gpu >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"GPU {gpu} is needed, but there are only {count}: lower data_parallel_size or "
            "tensor_parallel_size, or name the GPUs of each replica with replica_devices"
        )
    return gpu


def _bind_to_cores(cores: Collection[int]) -> None:
    """Run this thread, and those that it starts, on these cores only. Empty: on any."""
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("replica_devices needs Linux to bind a replica to cores: drop it")
    usable = os.sched_getaffinity(0)
    if missing := set(cores) - usable:
        raise ConfigError(
            f"replica_devices names core {min(missing)}, but this process may only use "
            f"{', '.join(map(str, sorted(usable)))}"
        )
    os.sched_setaffinity(0, cores)


def _available_host_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error means OOM. The CPU allocator raises a plain RuntimeError."""
    is_named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_named or "can't allocate memory" in str(error)
