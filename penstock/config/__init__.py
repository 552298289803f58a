"""Typed, documented dataclasses: the only source of all options."""

from typing import TYPE_CHECKING, NoReturn

from penstock.config.chat import ChatConfig
from penstock.config.engine import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    StructuredConfig,
)
from penstock.config.kv_events import KVEventsConfig
from penstock.config.lora import LoRAConfig
from penstock.config.media import MediaConfig
from penstock.config.model import LoadConfig, ModelConfig
from penstock.config.pooling import PoolingConfig
from penstock.config.server import ServerConfig
from penstock.config.speculative import SpeculativeConfig, SpeculativeSettings
from penstock.protocol.vllm_fields import refuse_class

__all__ = [
    "CacheConfig",
    "ChatConfig",
    "DeviceConfig",
    "EngineConfig",
    "KVEventsConfig",
    "LoRAConfig",
    "LoadConfig",
    "MediaConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PoolingConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "SpeculativeSettings",
    "StructuredConfig",
]


# Those of vLLM's classes whose options are objects here.
AttentionConfig = CompilationConfig = KVTransferConfig = dict
PoolerConfig = ProfilerConfig = StructuredOutputsConfig = dict

if not TYPE_CHECKING:  # which would take any name for one of this module

    def __getattr__(name: str) -> NoReturn:
        refuse_class(__name__, name)
