"""Typed, documented dataclasses: the only source of the engine's options."""

from penstock.config.engine import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.config.model import LoadConfig, ModelConfig

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
]
