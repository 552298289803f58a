"""LoRA adapters: finding, identifying, reading and merging them."""
