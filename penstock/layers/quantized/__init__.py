"""Layers with quantized weights.

`checkpoints.py` and `compressed_tensors.py` read a checkpoint's `quantization_config`, `plan.py`
gives each layer its scheme. A scheme (`schemes.py`, `packed.py`, `bitsandbytes.py`) knows how a
format's tensors lie in a checkpoint and brings them into the one layout of their kind
(`weights.py`). Layers follow the strategy in `linear.py`, experts that of `experts.py`;
`native.py` hands integers to the C++ library, `dummy.py` makes weights up.
"""
