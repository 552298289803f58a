"""Structured output: grammars, and the masks that hold a model to them."""
