"""GPT-OSS: sliding windows in every other layer, attention sinks, experts with biases.

The published checkpoints store the experts in MXFP4: 4-bit numbers, of which 32 in a row share a
power of two. They stay in MXFP4 where the expert kernels support it (`layers/quantized`). Otherwise
they are unpacked while they load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from penstock.layers.matrix import MatrixLayer
from penstock.layers.quantized.experts import QuantizedExperts
from penstock.layers.quantized.linear import QuantizedMethod
from penstock.layers.sublayers import RotaryAttention
from penstock.models.config import check_fixed
from penstock.models.decoder import DecoderLM
from penstock.models.experts import make_experts
from penstock.models.gemma2 import layer_is_windowed
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.quantized import dequantize_fp4
from penstock.protocol.errors import ModelError

EXPERTS = ".mlp.experts."
GROUP = 32  # numbers that share a scale


class GptOssForCausalLM(DecoderLM):
    weights = DecoderLM.weights.renaming(
        {
            r"\.self_attn\.sinks$": ".self_attn.attention.sinks",
            r"\.mlp\.router\.": ".mlp.gate.",
        }
    )
    defaults = {
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
    }

    def attention(self, index: int) -> RotaryAttention:
        config = self.config
        return self.rotary_attention(
            index,
            self.attention_bias,
            window=config.sliding_window if layer_is_windowed(config, index, 2) else None,
            has_sinks=True,
        )

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        check_fixed(config.raw, swiglu_limit=7.0, swiglu_alpha=1.702)
        return make_experts(
            self.build,
            config,
            config.intermediate_size,
            renormalize=True,
            activation="swiglu_clamped",
            bias=True,
            router_bias=True,
        )

    def convert(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Split tensors that hold all experts of a layer, packed or not, into single experts."""
        halves: dict[str, dict[str, torch.Tensor]] = {}  # of packed tensors, until both are there
        keeps_mxfp4 = self._keeps_mxfp4()
        for name, tensor in tensors:
            layer, _, own = name.partition(EXPERTS)
            is_stacked = own.startswith(("gate_up_proj", "down_proj"))
            if not is_stacked or isinstance(tensor, BlockTensor):
                yield name, tensor
                continue
            prefix, (matrix, _, kind) = layer + EXPERTS, own.partition("_proj")
            if kind in ("_blocks", "_scales"):
                both = halves.setdefault(prefix + matrix, {})
                both[kind] = tensor
                if len(both) == 2:
                    del halves[prefix + matrix]
                    packed = _Packed(name, both["_blocks"], both["_scales"])
                    if keeps_mxfp4:
                        # [rows, bytes of a row] of each expert, and [rows, quantization blocks]
                        yield from _by_expert(
                            prefix, matrix, "weight_packed", packed.blocks.flatten(-2)
                        )
                        yield from _by_expert(prefix, matrix, "weight_scale", packed.scales)
                    else:
                        yield from _by_expert(prefix, matrix, "weight", packed)
            elif kind == "_bias":
                yield from _by_expert(prefix, matrix, "bias", tensor)
            else:
                yield from _by_expert(prefix, matrix, "weight", tensor.transpose(-1, -2))
        for name in halves:
            yield name + "_proj_blocks", torch.empty(0)  # surplus: the other half is missing

    def _keeps_mxfp4(self) -> bool:
        """Whether the experts have a quantized method."""
        methods = (module.method for module in self.modules() if isinstance(module, MatrixLayer))
        return any(isinstance(module, QuantizedExperts) for module in self.modules()) or any(
            isinstance(method, QuantizedMethod) for method in methods
        )


class _Packed:
    """The experts of a layer in MXFP4, unpacked one at a time."""

    def __init__(self, name: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        # [experts, rows, quantization blocks, 16 bytes] and [experts, rows, quantization blocks]
        if blocks.dim() != 4 or blocks.shape[:-1] != scales.shape or blocks.shape[-1] != GROUP // 2:
            raise ModelError(
                f"tensor {name}: blocks {list(blocks.shape)} and scales {list(scales.shape)} "
                f"do not match"
            )
        self.blocks, self.scales = blocks, scales

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, expert: int) -> torch.Tensor:
        return unpack_mxfp4(self.blocks[expert], self.scales[expert])


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, n, 16] and exponents [rows, n], uint8 -> [rows, 32 * n] bfloat16, exactly."""
    return dequantize_fp4(blocks.flatten(1), scales, None, GROUP).bfloat16()


def _by_expert(
    prefix: str, matrix: str, parameter: str, tensors: torch.Tensor | _Packed
) -> Iterator[tuple[str, torch.Tensor]]:
    for expert in range(len(tensors)):
        own = tensors[expert]
        if matrix == "gate_up":  # rows of gate and up alternate
            yield f"{prefix}{expert}.gate_proj.{parameter}", own[0::2]
            yield f"{prefix}{expert}.up_proj.{parameter}", own[1::2]
        else:
            yield f"{prefix}{expert}.{matrix}_proj.{parameter}", own
