"""The torch profiler: whether `start_profile` works, and what a trace holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.config.options import naming_option, option, options_of, parse_keys
from penstock.protocol.errors import ConfigError


@dataclass(frozen=True)
class ProfilerSettings:
    """The keys of `profiler_config`."""

    profiler: Literal["torch"] = option("torch", "torch: the torch profiler.")
    torch_profiler_dir: str = option("", "Folder for the traces, one file per rank. Required.")
    torch_profiler_with_stack: bool = option(False, "Record the Python stack of each operation.")
    torch_profiler_record_shapes: bool = option(False, "Record the shapes of tensors.")
    torch_profiler_with_memory: bool = option(False, "Record allocations.")
    torch_profiler_with_flops: bool = option(False, "Estimate the operations' FLOPs.")

    def __post_init__(self) -> None:
        if not self.torch_profiler_dir:
            raise ConfigError("torch_profiler_dir must name a folder")


@dataclass(frozen=True)
class ProfilerConfig:
    profiler_config: dict[str, Any] | None = option(
        None,
        "Profiler for LLM.start_profile and /start_profile, as JSON such as "
        '{"torch_profiler_dir": "traces"}. Keys: '
        + ", ".join(key.name for key in options_of(ProfilerSettings))
        + ". Default: off.",
    )

    def __post_init__(self) -> None:
        with naming_option("profiler_config"):
            _ = self.settings

    @property
    def settings(self) -> ProfilerSettings | None:
        """None: nothing can be profiled."""
        if not self.profiler_config:
            return None
        given = parse_keys(ProfilerSettings, self.profiler_config, "profiler_config")
        return ProfilerSettings(**given)
