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
from penstock.protocol.vllm_fields import refuse_class
from penstock.protocol.vllm_modules import answer_imports

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
    from penstock.async_llm import AsyncLLM as AsyncLLMEngine
    from penstock.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from penstock.llm import LLM
    from penstock.llm_engine import LLMEngine
    from penstock.text.prompts import Prompt as PromptType

__version__ = VERSION
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

answer_imports()


def __getattr__(name: str) -> Any:
    if name in ("LLM", "LLMEngine"):  # import torch, so only when they are asked for
        from penstock.protocol.processes import collector_at_rest

        with collector_at_rest():
            if name == "LLM":
                from penstock.llm import LLM

                return LLM
            from penstock.llm_engine import LLMEngine

            return LLMEngine
    if name in ("AsyncLLM", "AsyncLLMEngine"):
        from penstock.async_llm import AsyncLLM

        return AsyncLLM
    if name in ("EngineArgs", "AsyncEngineArgs"):
        from penstock.engine.arg_utils import EngineArgs

        return EngineArgs
    if name == "PromptType":
        from penstock.text.prompts import Prompt

        return Prompt
    return refuse_class(__name__, name)
