"""Places where vLLM's scripts look for names."""
