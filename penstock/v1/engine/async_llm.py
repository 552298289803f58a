"""vLLM's place for AsyncLLM."""

from penstock.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
