"""vLLM's place for LLMEngine."""

from penstock.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
