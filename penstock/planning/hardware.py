"""GPUs by name. Only the H200's numbers were measured; the others are those of data sheets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from penstock.protocol.errors import ConfigError

GIB = 2**30
PCIE = 25.0
NETWORK = 50.0  # 400 Gbit/s for each GPU
MOST_GPUS = 1 << 20  # all are on one node


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float  # that a process sees
    bandwidth: float  # of memory, TB/s
    flops: float  # dense, of 16-bit floats, TFLOP/s
    link: float = PCIE  # to the other GPUs of its node, GB/s in one direction
    network: float = NETWORK  # to those of other nodes
    per_node: int = MOST_GPUS

    def rate(self, num_ranks: int) -> float:
        """Bytes per second between neighbouring ranks: over the network, if they need nodes."""
        return 1e9 * (self.link if num_ranks <= self.per_node else self.network)

    def exchange_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """For a rank to send as much to each of the others, those of other nodes at once."""
        far = max(num_ranks - self.per_node, 0) / num_ranks
        near = num_bytes * (1 - far) / (self.link * 1e9)
        return max(near, num_bytes * far / (self.network * 1e9))

    def gather_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """For a rank to send the same to all others. Each node gets it over the network once."""
        near = num_bytes * (num_ranks - 1) / (self.link * 1e9)
        far = num_bytes * max(num_ranks / self.per_node - 1, 0)
        return max(near, far / (self.network * 1e9))

    @property
    def memory(self) -> int:
        return int(self.memory_gib * GIB)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 178.0, 8.0, 2250.0, 900.0),
        Gpu("h200", 139.8, 4.8, 989.0, 450.0),
        Gpu("h100", 79.2, 3.35, 989.0, 450.0),
        Gpu("h100-nvl", 93.1, 3.9, 835.0, 300.0),
        Gpu("h100-pcie", 79.2, 2.0, 756.0),
        Gpu("h20", 95.1, 4.0, 148.0, 450.0),
        Gpu("a100", 79.2, 2.04, 312.0, 300.0),
        Gpu("a100-40gb", 39.4, 1.555, 312.0, 300.0),
        Gpu("l40s", 44.4, 0.864, 362.0),
        Gpu("l40", 44.4, 0.864, 181.0),
        Gpu("l4", 22.0, 0.3, 121.0),
        Gpu("a10", 22.1, 0.6, 125.0),
        Gpu("rtx4090", 23.6, 1.008, 165.0),
        Gpu("rtx3090", 23.6, 0.936, 71.0),
    )
}


def find_gpu(name: str) -> Gpu:
    """Raises ConfigError with the nearest names."""
    key = name.lower().replace("_", "-").removeprefix("nvidia-")
    if key in GPUS:
        return GPUS[key]
    near = difflib.get_close_matches(key, GPUS, n=3, cutoff=0.5)
    said = f"did you mean {', '.join(near)}? " if near else ""
    raise ConfigError(
        f"the GPU {name!r} is unknown: {said}Known are {', '.join(GPUS)}; of any other, give "
        "--memory, --bandwidth and --flops"
    )


def on_nodes(gpu: Gpu, num_gpus: int, num_nodes: int, network: float) -> Gpu:
    """The GPU as one of so many nodes with as many each. `network` is in GB/s per GPU."""
    if not 0 < network < float("inf"):
        raise ConfigError(f"--network must be above 0, got {network:g}")
    if num_nodes < 1 or num_gpus % num_nodes:
        raise ConfigError(f"--nodes must divide the {num_gpus} GPUs, got {num_nodes}")
    per_node = num_gpus // num_nodes if num_nodes > 1 else MOST_GPUS
    return replace(gpu, network=network, per_node=per_node)


def choose_gpu(
    name: str | None, memory: float | None, bandwidth: float | None, flops: float | None
) -> Gpu:
    """The GPU of this name, with these numbers instead of its own. Without a name, all are needed.

    Memory is in GiB, bandwidth in TB/s, flops in TFLOP/s.
    """
    given = {"--memory": memory, "--bandwidth": bandwidth, "--flops": flops}
    for flag, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} must be above 0, got {value:g}")
    if name is None:
        missing = [flag for flag, value in given.items() if value is None]
        if len(missing) == len(given):
            return GPUS["h200"]
        if missing:
            raise ConfigError(
                f"a GPU without a name needs --memory, --bandwidth and --flops: "
                f"{' and '.join(missing)} missing; or name one with --gpu"
            )
    base = Gpu("custom", 0, 0, 0) if name is None else find_gpu(name)
    return Gpu(
        base.name,
        base.memory_gib if memory is None else memory,
        base.bandwidth if bandwidth is None else bandwidth,
        base.flops if flops is None else flops,
        base.link,
    )
