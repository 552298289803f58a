"""vLLM's place for what its scripts call after an LLM."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, NoReturn

from penstock.protocol.vllm_fields import refuse_class

__all__ = ["cleanup_dist_env_and_memory"]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of LLMs that nobody uses any more. Their ranks are gone, also Ray's."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if not TYPE_CHECKING:  # which would take any name for one of this module

    def __getattr__(name: str) -> NoReturn:
        refuse_class(__name__, name)
