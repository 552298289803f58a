"""How many LoRA adapters an engine serves at once, and how large they may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.options import option, require
from penstock.protocol.errors import ConfigError

LARGEST_RANK = 512


@dataclass(frozen=True)
class LoRAConfig:
    enable_lora: bool = option(False, "Serve LoRA adapters beside the base model.")
    max_loras: int = option(
        8,
        "Maximum number of LoRA adapters in one step. Each takes a slot of device memory for "
        "max_lora_rank.",
    )
    max_cpu_loras: int | None = option(
        None,
        "Maximum number of LoRA adapters in host memory, at least max_loras. The least recently "
        "used one is dropped for another. Default: max_loras.",
    )
    max_lora_rank: int = option(
        16, f"Maximum rank of a LoRA adapter, from 1 to {LARGEST_RANK}. Larger ones are refused."
    )
    lora_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Data type of LoRA weights. auto: the model's."
    )

    def __post_init__(self) -> None:
        require(self, "max_loras", "max_lora_rank", least=1)
        if self.max_lora_rank > LARGEST_RANK:
            raise ConfigError(
                f"max_lora_rank must be at most {LARGEST_RANK}, got {self.max_lora_rank}"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras must be at least max_loras ({self.max_loras}): the adapters of "
                f"running requests stay in host memory, got {self.max_cpu_loras}"
            )

    @property
    def num_host_adapters(self) -> int:
        """Adapters that host memory holds."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
