"""Writing quantized checkpoints: what `penstock quantize` does."""
