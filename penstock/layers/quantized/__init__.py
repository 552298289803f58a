"""Layers with quantized weights.

`checkpoints.py` and `compressed_tensors.py` read a checkpoint's `quantization_config`. `plan.py`
gives each layer its scheme. A scheme (`schemes.py`, `packed.py`, `bitsandbytes.py`) knows the
checkpoint layout of a format and converts its tensors to the one memory layout of their kind
(`weights.py`). `linear.py` handles linear layers, `experts.py` handles experts. `native.py` passes
integers to the C++ library. `dummy.py` generates random weights.
"""
