"""LoRA adapters of the server: which there are, where they come from, who uses them."""
