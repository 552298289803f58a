"""Penstock: an inference and serving engine for large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.protocol.adapter import LoRARequest
from penstock.protocol.outputs import CompletionOutput, RequestOutput
from penstock.protocol.pooling import PoolingParams
from penstock.protocol.sampling import RequestOutputKind, SamplingParams
from penstock.protocol.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
    from penstock.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imports torch, so only when it is asked for
        from penstock.engine.heap import collector_at_rest

        with collector_at_rest():
            from penstock.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from penstock.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
