"""All of the engine's options together, and what combinations of them are refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.config.chat import ChatConfig
from penstock.config.eplb import EplbSettings
from penstock.config.kv_events import KVEventsConfig
from penstock.config.lora import LoRAConfig
from penstock.config.media import MediaConfig
from penstock.config.model import LoadConfig, ModelConfig
from penstock.config.options import (
    Option,
    coerce,
    option,
    options_of,
    parse_numbers,
    refuse_unknown_option,
    require,
)
from penstock.config.pooling import PoolingConfig
from penstock.config.profiler import ProfilerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.config.vllm_names import leave_out_foreign
from penstock.protocol.errors import ConfigError

KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"]
RoutingPolicy = Literal["prefix", "least-loaded", "round-robin"]
MOST_REPLICAS = 1024  # on one machine
MOST_CPU_THREADS = 1024  # more than machines have; what a slip of the keyboard asks for


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = option(16, "Tokens per KV cache block; a power of two up to 256.")
    gpu_memory_utilization: float = option(
        0.92, "Fraction of GPU memory for weights, activations and KV cache."
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV cache, such as 4GiB; default: the memory that is left."
    )
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV cache blocks, regardless of memory; for tests."
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        "Data type of the KV cache. auto: the model's, or float16 if the CPU computes on "
        "quantized blocks. int8 (CPU): half the memory of float16, plus a float32 scale per token "
        "and head; docs/cpu.md has the accuracy loss. fp8 (e4m3, GPU): half the memory of "
        "bfloat16, with the checkpoint's key and value scales if it has any.",
    )
    enable_prefix_caching: bool = option(
        True, "Reuse KV cache blocks of earlier requests for prompts with the same prefix."
    )

    def __post_init__(self) -> None:
        size = self.block_size
        if not 1 <= size <= 256 or size & (size - 1):
            raise ConfigError(f"block_size must be a power of two from 1 to 256, got {size}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "gpu_memory_utilization must be above 0 and at most 1, "
                f"got {self.gpu_memory_utilization}"
            )
        require(self, "kv_cache_memory_bytes", above=0)
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise ConfigError(
                "num_gpu_blocks_override must be at least 2 (one block is the null block), "
                f"got {self.num_gpu_blocks_override}"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int | None = option(
        None,
        "Maximum number of requests that run at once; default: by the device, 128 on a CPU.",
    )
    max_num_batched_tokens: int | None = option(
        None, "Maximum tokens per step; default: by the device."
    )
    enable_chunked_prefill: bool = option(
        True,
        "Split prompts that do not fit into one step. If off, max_num_batched_tokens must be at "
        "least max_model_len.",
    )
    long_prefill_token_threshold: int = option(
        0,
        "Maximum prompt tokens per request and step, so that long prompts do not block others; 0: "
        "no limit.",
    )
    scheduling_policy: Literal["fcfs", "priority", "fair"] = option(
        "fcfs",
        "Order of waiting requests. fcfs: first come, first served; priority: lowest `priority` "
        "first; fair: API keys share the engine by requested tokens.",
    )
    queue_timeout_s: float | None = option(
        None,
        "Maximum seconds that a request waits in the queue; then it fails with 429. Default: no "
        "limit.",
    )
    async_scheduling: bool | None = option(
        None, "Schedule the next step while the current one runs; default: on for GPUs."
    )

    def __post_init__(self) -> None:
        require(self, "max_num_seqs", "max_num_batched_tokens", least=1)
        require(self, "queue_timeout_s", above=0)
        require(self, "long_prefill_token_threshold", least=0)
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                "long_prefill_token_threshold splits prompts: it needs enable_chunked_prefill"
            )


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = option(1, "Number of tensor-parallel ranks, one process each.")
    pipeline_parallel_size: int = option(
        1,
        "Number of pipeline stages. Each holds some of the layers, on tensor_parallel_size ranks.",
    )
    enable_expert_parallel: bool = option(
        False,
        "Give each rank some of the experts, whole, instead of a slice of every expert; for models "
        "with experts. With data_parallel_size they are spread over the ranks of all replicas, "
        "which then are one engine and step together (docs/scaling.md).",
    )
    all2all_backend: Literal["all_to_all", "allgather_reducescatter"] = option(
        "all_to_all",
        "How tokens reach experts that are spread over replicas. all_to_all: only the ranks of "
        "their experts; allgather_reducescatter: all ranks, which moves less if a token has more "
        "experts than there are ranks.",
    )
    enable_eplb: bool = option(
        False,
        "Move experts between ranks so that all have equal work, with copies of the busiest ones. "
        "Requires enable_expert_parallel.",
    )
    eplb_config: dict[str, Any] | None = option(
        None, 'Load balancing of experts, as JSON such as {"num_redundant_experts": 8}.'
    )
    distributed_executor_backend: Literal["mp", "ray"] = option(
        "mp",
        "How ranks are started. mp: this machine, and with nnodes others that join it; ray: a Ray "
        "cluster, one actor per rank (requires penstock[ray]).",
    )
    ray_address: str | None = option(
        None, "HOST:PORT of the Ray cluster's head node; default: the cluster of this machine."
    )
    nnodes: int = option(
        1, "Number of machines that share the ranks. Each runs penstock serve with its node_rank."
    )
    node_rank: int = option(
        0, "Number of this machine. 0 has the engine and the API, the others only run ranks."
    )
    master_addr: str = option(
        "127.0.0.1", "Address of node 0 in the network between the nodes, which must be trusted."
    )
    master_port: int = option(29501, "Port at which node 0 waits for the other nodes.")
    data_parallel_size: int = option(
        1,
        "Number of replicas: engines with the whole model behind one endpoint. They cover for each "
        "other if one crashes (docs/scaling.md).",
    )
    replica_devices: list[str] = option(
        [],
        "GPUs or CPU cores of each replica, one value per replica, such as 0-7 or 0,2. Default: "
        "each replica has the next GPUs, or the cores are shared and threads divided.",
    )
    data_parallel_rank: int = option(
        0,
        "Rank of this server among those behind an external load balancer. KV events carry it, and "
        "their ports are offset by it.",
    )
    data_parallel_routing: RoutingPolicy = option(
        "prefix",
        "How replicas are chosen. prefix: by cached prefix and load; least-loaded: by the number "
        "of unfinished requests; round-robin: in turn.",
    )

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        require(self, *sizes, least=1)
        require(self, "data_parallel_rank", least=0)
        if self.data_parallel_size > MOST_REPLICAS:
            raise ConfigError(
                f"data_parallel_size must be at most {MOST_REPLICAS}, got {self.data_parallel_size}"
            )
        if self.num_lanes > 1 and self.pipeline_parallel_size > 1:
            raise ConfigError(
                "enable_expert_parallel with data_parallel_size > 1 needs pipeline_parallel_size 1"
            )
        if self.replica_devices and len(self.replica_devices) != self.num_engines:
            raise ConfigError(
                f"replica_devices must have one value for each of the {self.num_engines} "
                f"engines (data_parallel_size, 1 if experts are spread over all), got "
                f"{len(self.replica_devices)}"
            )
        for index in range(len(self.replica_devices)):
            self.devices_of(index)
        self._check_nodes()
        if self.eplb_config is not None and not self.enable_eplb:
            raise ConfigError("eplb_config needs enable_eplb")
        num_ranks = self.tensor_parallel_size * self.num_lanes
        if self.enable_eplb and not (self.enable_expert_parallel and num_ranks > 1):
            raise ConfigError(
                "enable_eplb needs experts that are spread over ranks: set enable_expert_parallel, "
                "and tensor_parallel_size or data_parallel_size above 1"
            )
        EplbSettings.parse(self.eplb_config)

    def _check_nodes(self) -> None:
        require(self, "nnodes", "master_port", least=1)
        require(self, "node_rank", least=0)
        if self.master_port > 65535:
            raise ConfigError(f"master_port must be at most 65535, got {self.master_port}")
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank must be below nnodes ({self.nnodes}), got {self.node_rank}"
            )
        if self.num_ranks % self.nnodes:
            fitting = [str(n) for n in range(1, self.num_ranks + 1) if self.num_ranks % n == 0]
            raise ConfigError(
                f"nnodes must divide the {self.num_ranks} ranks (tensor_parallel_size x "
                f"pipeline_parallel_size{' x data_parallel_size' if self.num_lanes > 1 else ''}), "
                f"got {self.nnodes}: use {', '.join(fitting)}"
            )
        if self.nnodes > 1 and self.distributed_executor_backend == "ray":
            raise ConfigError("nnodes > 1 is for distributed_executor_backend=mp: drop one of them")
        if self.ray_address is not None and self.distributed_executor_backend != "ray":
            raise ConfigError("ray_address needs distributed_executor_backend=ray")
        if self.nnodes > 1 and self.num_engines > 1:
            raise ConfigError(
                "nnodes > 1 and data_parallel_size > 1 can be combined only with "
                "enable_expert_parallel: otherwise start a server per replica, with "
                "data_parallel_rank"
            )

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.nnodes

    @property
    def num_lanes(self) -> int:
        """Replicas in one engine: all, if experts are spread over their ranks."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def num_engines(self) -> int:
        return self.data_parallel_size // self.num_lanes

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.num_lanes

    @property
    def eplb(self) -> EplbSettings | None:
        """None: experts stay where they are."""
        return EplbSettings.parse(self.eplb_config) if self.enable_eplb else None

    @property
    def num_redundant_experts(self) -> int:
        return 0 if self.eplb is None else self.eplb.num_redundant_experts

    def devices_of(self, replica: int) -> tuple[int, ...]:
        """The GPUs or cores in `replica_devices`. Empty: none are given for this replica."""
        if replica >= len(self.replica_devices):
            return ()
        return parse_numbers("replica_devices", self.replica_devices[replica])


@dataclass(frozen=True)
class DeviceConfig:
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Device to run on. auto: a GPU if there is one, otherwise the CPU."
    )
    cpu_threads: int | None = option(
        None,
        "Compute threads per process on a CPU; default: one per physical core that affinity and "
        "container limits allow, one less above 8 cores, at most 48.",
    )
    cpu_backend: Literal["auto", "torch"] = option(
        "auto", "Kernels to use on a CPU. auto: the C++ library if it is built; torch: PyTorch."
    )
    enforce_eager: bool = option(False, "Disable CUDA graphs.")
    # Set for each replica, not by users.
    device_ids: tuple[int, ...] = ()  # its GPUs, one per rank, or its cores; default: by the next
    first_gpu: int = 0  # of its ranks
    num_replicas: int = 1  # that share the cores

    def __post_init__(self) -> None:
        if self.cpu_threads is not None and not 1 <= self.cpu_threads <= MOST_CPU_THREADS:
            raise ConfigError(
                f"cpu_threads must be from 1 to {MOST_CPU_THREADS}, got {self.cpu_threads}"
            )


@dataclass(frozen=True)
class StructuredConfig:
    structured_outputs_backend: Literal["llguidance", "xgrammar"] = option(
        "llguidance", "Structured output engine. xgrammar requires penstock[xgrammar]."
    )
    structured_outputs_timeout_s: float = option(
        5.0, "Maximum CPU seconds to compile a schema, regular expression or grammar."
    )

    def __post_init__(self) -> None:
        require(self, "structured_outputs_timeout_s", above=0)


@dataclass(frozen=True)
class ObservabilityConfig:
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Minimum log level. Logs go to standard error."
    )
    log_format: Literal["text", "json"] = option(
        "text", "Format of log lines; json: one JSON object per line."
    )
    disable_log_stats: bool = option(False, "Do not log throughput.")
    metrics_prefix: str = option(
        "penstock:",
        "Prefix of the model's metrics. vllm: makes dashboards for vLLM work unchanged.",
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", self.metrics_prefix):
            raise ConfigError(
                "metrics_prefix must be letters, digits, _ and :, not beginning with a digit, "
                f"got {self.metrics_prefix!r}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is made from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def __post_init__(self) -> None:
        budget, longest = self.scheduler.max_num_batched_tokens, self.model.max_model_len
        if not self.scheduler.enable_chunked_prefill and budget and longest and budget < longest:
            raise ConfigError(
                f"without enable_chunked_prefill, max_num_batched_tokens ({budget}) must be at "
                f"least max_model_len ({longest})"
            )
        if self.model.skip_tokenizer_init and self.model.tokenizer is not None:
            raise ConfigError("skip_tokenizer_init and tokenizer cannot be combined: drop one")
        if self.model.skip_tokenizer_init and self.model.chat_template is not None:
            raise ConfigError("chat_template needs a tokenizer: drop skip_tokenizer_init")
        self.speculative.check_ranks(self.parallel.tensor_parallel_size)

    @classmethod
    def sections(cls) -> dict[str, type]:
        """The dataclasses that options live in, by the attribute that holds each."""
        return {f.name: f.default_factory for f in dataclasses.fields(cls)}  # type: ignore[misc]

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from flat option names, the same that flags, keywords and YAML use.

        Refuses names it does not know, and values of the wrong type.
        """
        unknown = dict(options)
        built: dict[str, Any] = {}
        for section, config_class in cls.sections().items():
            values = {}
            for declared in options_of(config_class):
                if declared.name in unknown:
                    values[declared.name] = coerce(declared, unknown.pop(declared.name))
            built[section] = config_class(**values)
        if unknown := leave_out_foreign(unknown):
            known = [declared.name for section in all_options().values() for declared in section]
            refuse_unknown_option(next(iter(unknown)), known)
        return cls(**built)

    def options(self) -> dict[str, Any]:
        """All options by name, as `from_options` takes them."""
        return {
            declared.name: getattr(getattr(self, section), declared.name)
            for section, options in all_options().items()
            for declared in options
        }


def all_options() -> dict[str, list[Option]]:
    """Every engine option, by section: what the CLI and the docs list."""
    return {name: list(options_of(cls)) for name, cls in EngineConfig.sections().items()}
