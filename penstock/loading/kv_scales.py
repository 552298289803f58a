"""Loads a checkpoint's scales of an fp8 KV cache, under the names that tools give them."""

from __future__ import annotations

import math
import re

from torch import nn

from penstock.layers.attention import Attention
from penstock.ops.blocks import BlockTensor, Weight
from penstock.protocol.errors import ModelError

# self_attn.k_scale, self_attn.attn.k_scale, self_attn.k_proj.k_scale, k_proj.output_scale, and
# self_attn.kv_scale for both. The scales of queries and probabilities are not needed.
_NAME = re.compile(
    r"^(?P<block>.+?)\.(?:(?:attn\.|[qkv]_proj\.)?(?P<which>kv|k|v|q|prob)_scale"
    r"|(?P<part>[qkv])_proj\.output_scale)$"
)


class KVScales:
    """Passes the scales to the attention layers. The default scale is 1."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {
            path.rpartition(".")[0]: module
            for path, module in model.named_modules()
            if isinstance(module, Attention)
        }

    def take(self, name: str, tensor: Weight) -> bool:
        """Handle a tensor, under the model's name, if it is such a scale. Returns whether it is."""
        match = _NAME.match(name)
        layer = self._layers.get(match["block"]) if match else None
        if match is None or layer is None:
            return False
        if isinstance(tensor, BlockTensor) or tensor.numel() != 1:
            raise ModelError(f"tensor {name} must be one number, has shape {list(tensor.shape)}")
        scale = float(tensor.float().item())
        if not math.isfinite(scale) or scale <= 0.0:
            raise ModelError(f"tensor {name} must be a positive scale, is {scale}")
        which = match["which"] or match["part"]
        key, value = layer.kv_scales
        layer.kv_scales = (
            scale if which in ("k", "kv") else key,
            scale if which in ("v", "kv") else value,
        )
        return True
