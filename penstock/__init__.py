"""Penstock: an inference and serving engine for large language models."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from penstock.protocol.outputs import CompletionOutput, RequestOutput
from penstock.protocol.sampling import RequestOutputKind, SamplingParams
from penstock.protocol.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from penstock.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imports torch, so only when it is asked for
        # The objects of so many modules stay: a collector that walks them, again and again as they
        # come, takes a tenth of the time that it takes to import them.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            from penstock.llm import LLM
        finally:
            if was_enabled:
                gc.enable()
        return LLM
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
