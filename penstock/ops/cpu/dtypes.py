"""The numbers of element types in GGUF files and in the library."""

import torch

FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
CACHE_TYPES = {**FLOAT_TYPES, torch.int8: 24}
BLOCK_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14
}  # fmt: skip
NATIVE_TYPES = frozenset({*BLOCK_TYPES, "F32", "F16", "BF16"})
"""Types that need no dequantization at load."""
