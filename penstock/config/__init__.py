"""Typed, documented dataclasses: the only source of all options."""

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
