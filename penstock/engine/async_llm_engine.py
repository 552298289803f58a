"""vLLM's place for AsyncLLMEngine."""

from typing import TYPE_CHECKING, NoReturn

from penstock.async_llm import AsyncLLM as AsyncLLMEngine
from penstock.protocol.vllm_fields import refuse_class

__all__ = ["AsyncLLMEngine"]

if not TYPE_CHECKING:  # which would take any name for one of this module

    def __getattr__(name: str) -> NoReturn:
        refuse_class(__name__, name)
