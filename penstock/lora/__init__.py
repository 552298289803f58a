"""vLLM's package of LoRA adapters: see `request`."""
