"""Scales of an fp8 KV cache that a checkpoint may have, under the names that tools give them."""

from __future__ import annotations

import math
import re

from torch import nn

from penstock.layers.attention import Attention
from penstock.ops.blocks import BlockTensor, Weight
from penstock.protocol.errors import ModelError

# self_attn.k_scale, self_attn.attn.k_scale, self_attn.k_proj.k_scale, k_proj.output_scale, and of
# both at once self_attn.kv_scale. Those of queries and of probabilities are not needed here.
_NAME = re.compile(
    r"^(?P<block>.+?)\.(?:(?:attn\.|[qkv]_proj\.)?(?P<which>kv|k|v|q|prob)_scale"
    r"|(?P<part>[qkv])_proj\.output_scale)$"
)


class KVScales:
    """Hands them to the attention layers. Without any, scales are 1."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {
            path.rpartition(".")[0]: module
            for path, module in model.named_modules()
            if isinstance(module, Attention)
        }

    def take(self, name: str, tensor: Weight) -> bool:
        """Whether a tensor of this name, the model's own, is one of them."""
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
