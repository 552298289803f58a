"""vLLM's place for the types of prompts."""

from penstock.protocol.prompts import TextPrompt, TokensPrompt
from penstock.text.prompts import Prompt as PromptType

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
