"""vLLM's older place for the types of prompts."""

from penstock.inputs import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
