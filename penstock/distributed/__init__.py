"""Ranks: who they are, and how stages hand over."""

from typing import TYPE_CHECKING, NoReturn

from penstock.distributed.parallel_state import cleanup_dist_env_and_memory
from penstock.protocol.vllm_fields import refuse_class

__all__ = ["cleanup_dist_env_and_memory"]

if not TYPE_CHECKING:  # which would take any name for one of this module

    def __getattr__(name: str) -> NoReturn:
        refuse_class(__name__, name)
