"""vLLM's place for the types of prompts."""

from penstock.protocol.prompts import TextPrompt, TokensPrompt

__all__ = ["TextPrompt", "TokensPrompt"]
