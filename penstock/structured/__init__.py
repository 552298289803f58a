"""Structured output: compiles grammars and fills the token masks that enforce them."""
