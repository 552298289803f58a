"""Penstock: an inference and serving engine for large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.protocol.adapter import LoRARequest
from penstock.protocol.beam_search import BeamSearchParams
from penstock.protocol.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from penstock.protocol.pooling import PoolingParams
from penstock.protocol.prompts import TextPrompt, TokensPrompt
from penstock.protocol.sampling import RequestOutputKind, SamplingParams
from penstock.protocol.structured import StructuredOutputsParams
from penstock.protocol.version import VERSION

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
    from penstock.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from penstock.llm import LLM

__version__ = VERSION
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
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
    if name in ("EngineArgs", "AsyncEngineArgs"):
        from penstock.engine.arg_utils import EngineArgs

        return EngineArgs
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
