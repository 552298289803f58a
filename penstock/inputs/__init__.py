"""vLLM's place for the types of prompts."""

from typing import TYPE_CHECKING, NoReturn

from penstock.protocol.prompts import TextPrompt, TokensPrompt
from penstock.protocol.vllm_fields import refuse_class
from penstock.text.prompts import Prompt as PromptType

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]

if not TYPE_CHECKING:  # which would take any name for one of this module

    def __getattr__(name: str) -> NoReturn:
        refuse_class(__name__, name)
