"""vLLM's place for LLM."""

from penstock.llm import LLM

__all__ = ["LLM"]
