"""Writes quantized checkpoints: the implementation of `penstock quantize`."""
