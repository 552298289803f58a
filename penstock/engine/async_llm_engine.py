"""vLLM's place for AsyncLLMEngine."""

from penstock.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
