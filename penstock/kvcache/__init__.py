"""KV accounting: which block of the one pool holds which tokens of which request. No torch."""
