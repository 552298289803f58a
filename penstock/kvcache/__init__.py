"""Decides which KV block of the single pool holds which tokens of which request. No torch."""
