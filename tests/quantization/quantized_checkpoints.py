"""Tiny checkpoints in every quantized format, each beside the floats that it stands for.

The packages compressed-tensors and bitsandbytes write their formats, and say what they stand for;
the others are written here from their published layouts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint

from penstock.loading.bitsandbytes import BitsAndBytesCheckpoint
from penstock.loading.wanted import IsWanted, always

Tensors = dict[str, torch.Tensor]
Writer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A weight [out, in] -> its tensors by parameter, and the floats that they stand for."""

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
FP8 = torch.float8_e4m3fn


def make_floats(folder: Path, variant: str = "qwen3", **settings: Any) -> Path:
    """A checkpoint in float16 to be quantized."""
    make_checkpoint(folder, variant, **{**SIZES, "initializer_range": 0.1, **settings})
    path = folder / "model.safetensors"
    save_file({name: t.half() for name, t in load_file(path).items()}, path, {"format": "pt"})
    return folder


def quantize(
    floats: Path,
    folder: Path,
    config: dict[str, Any],
    writer: Writer,
    is_quantized: Callable[[str], bool] = lambda layer: ".layers." in layer,
) -> tuple[Path, Path]:
    """Write `floats` in a format; the folder of that, and one with the floats it stands for."""
    quantized, restored = folder / "quantized", folder / "restored"
    for target in (quantized, restored):
        shutil.copytree(floats, target)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(floats / "model.safetensors").items():
        layer, _, parameter = name.rpartition(".")
        is_linear = parameter == "weight" and tensor.ndim == 2 and not layer.endswith("mlp.gate")
        if is_linear and is_quantized(layer):
            tensors, values = writer(tensor.float())
            stored |= {f"{layer}.{key}": value.contiguous() for key, value in tensors.items()}
            meant[name] = values.float().contiguous()
        else:
            stored[name] = tensor
            meant[name] = tensor.float()
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    save_file(meant, restored / "model.safetensors", {"format": "pt"})
    raw = json.loads((quantized / "config.json").read_text())
    raw["quantization_config"] = config
    (quantized / "config.json").write_text(json.dumps(raw))
    return quantized, restored


# -- integers by group


def _pack_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[n * per_word, m] -> [n, m] int32, the first in the low bits."""
    per_word = 32 // bits
    grouped = numbers.long().view(-1, per_word, numbers.shape[1])
    words = sum(grouped[:, place] << (bits * place) for place in range(per_word))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.uint32).view(torch.int32)


def _by_group(
    weight: torch.Tensor, groups: torch.Tensor, bits: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [out, in], scales and zeros [out, groups]; `groups` [in] names each column's."""
    limit = (1 << bits) - 1
    count = int(groups.max()) + 1
    low = torch.stack([weight[:, groups == g].amin(1) for g in range(count)], 1).clamp(max=0)
    high = torch.stack([weight[:, groups == g].amax(1) for g in range(count)], 1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        scales = (2 * high / limit).half().float()
        zeros = torch.full_like(scales, (limit + 1) // 2)
    else:
        scales = ((high - low) / limit).half().float()
        zeros = (-low / scales).round().clamp(0, limit)
    numbers = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, limit)
    return numbers, scales, zeros


def gptq(
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    version: int = 1,
) -> tuple[dict[str, Any], Writer]:
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric,
        "desc_act": act_order, "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        size = columns if group_size == -1 else group_size
        groups = torch.arange(columns) // size
        if act_order:  # one order for all layers with so many columns, as layers of one input have
            generator = torch.Generator().manual_seed(columns)
            groups = groups[torch.randperm(columns, generator=generator)]
        numbers, scales, zeros = _by_group(weight, groups, bits, symmetric)
        if version == 1:  # no zero is 0 here, which the first format cannot say cleanly
            zeros = zeros.clamp(min=1)
        tensors = {
            "qweight": _pack_words(numbers.t(), bits),
            "qzeros": _pack_words(zeros - (1 if version == 1 else 0), bits).t(),
            "scales": scales.t().half(),
            "g_idx": groups.int(),
        }
        return tensors, (numbers - zeros[:, groups]) * scales[:, groups]

    return config, write


def awq(group_size: int = 32) -> tuple[dict[str, Any], Writer]:
    config = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns of a word, from the low bits up

    def pack(numbers: torch.Tensor) -> torch.Tensor:
        """[n, out] -> [n, out / 8]."""
        words = numbers.view(len(numbers), -1, 8)[..., order].flatten(1)
        return _pack_words(words.t().contiguous(), 4).t()

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = torch.arange(weight.shape[1]) // group_size
        numbers, scales, zeros = _by_group(weight, groups, 4, symmetric=False)
        tensors = {
            "qweight": pack(numbers.t()),
            "qzeros": pack(zeros.t()),
            "scales": scales.t().half(),
        }
        return tensors, (numbers - zeros[:, groups]) * scales[:, groups]

    return config, write


# -- fp8


def _to_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp(-448, 448).to(FP8)


def fp8(granularity: str, static: bool = False) -> tuple[dict[str, Any], Writer]:
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "static" if static else "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    if granularity == "block":
        config["weight_block_size"] = [128, 128]
    if granularity == "channel":
        config = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if granularity == "block":
            rows, columns = (-(-n // 128) for n in weight.shape)
            scale = torch.empty(rows, columns)
            for i in range(rows):
                for j in range(columns):
                    block = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                    scale[i, j] = block.abs().max() / 448
            each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            each = each[: weight.shape[0], : weight.shape[1]]
            numbers = _to_fp8(weight, each)
            return {"weight": numbers, "weight_scale_inv": scale}, numbers.float() * each
        scale = weight.abs().amax() / 448
        if granularity == "channel":
            scale = weight.abs().amax(1, keepdim=True) / 448
        numbers = _to_fp8(weight, scale)
        tensors = {"weight": numbers, "weight_scale": scale}
        if static:
            tensors["input_scale"] = torch.tensor(0.02)
        return tensors, numbers.float() * scale

    return config, write


def modelopt_nvfp4() -> tuple[dict[str, Any], Writer]:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        whole = weight.abs().amax() / (6 * 448)
        groups = weight.view(len(weight), -1, 16)
        scale = (groups.abs().amax(-1) / 6 / whole).to(FP8)
        each = (scale.float() * whole)[..., None]
        scaled = groups / each
        nearest = (scaled.abs()[..., None] - values).abs().argmin(-1)
        codes = (nearest + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
        meant = (values[nearest] * scaled.sign() * each).flatten(1)
        tensors = {
            "weight": codes[:, ::2] | (codes[:, 1::2] << 4),
            "weight_scale": scale,
            "weight_scale_2": whole,
            "input_scale": torch.tensor(0.01),
        }
        return tensors, meant

    return config, write


# -- bitsandbytes, by its own package


def bitsandbytes(
    kind: str = "nf4", nested: bool = False, blocksize: int = 64
) -> tuple[dict[str, Any], Writer]:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "float32", "llm_int8_skip_modules": None,
    }  # fmt: skip

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        packed, state = quantize_4bit(
            weight, blocksize=blocksize, compress_statistics=nested, quant_type=kind
        )
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return {"weight": packed, **parts}, dequantize_4bit(packed, state)

    return config, write


def bitsandbytes_int8() -> tuple[dict[str, Any], Writer]:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, largest, _ = int8_vectorwise_quant(weight.half())
        tensors = {"weight": numbers, "SCB": largest, "weight_format": torch.tensor(0).byte()}
        return tensors, int8_vectorwise_dequant(numbers, largest)

    return config, write


class InMemory:
    """Tensors as a checkpoint."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return [*self._tensors]

    def tensors(self, is_wanted: IsWanted = always) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor) for name, tensor in self._tensors.items() if is_wanted(name))


def as_layers_take_them(tensors: Tensors) -> Tensors:
    """One layer's, by parameter: flat matrices of bitsandbytes come in rows, others as they are."""
    checkpoint = BitsAndBytesCheckpoint(InMemory({f"a.{key}": t for key, t in tensors.items()}))
    found = {}
    for name, tensor in checkpoint.tensors():
        assert isinstance(tensor, torch.Tensor)
        found[name.removeprefix("a.")] = tensor
    return found


# -- compressed-tensors, by its own package


def compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Writer]:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    activations = None if inputs is None else QuantizationArgs(**inputs)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=activations, format=form
    )
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        strategy = weights["strategy"]
        whole = None
        if strategy == "tensor":
            low, high = weight.min()[None], weight.max()[None]
        elif strategy == "channel":
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        elif strategy == "block":
            rows, columns = weight.shape
            whole_blocks = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
            blocks = whole_blocks.view(-(-rows // 128), 128, -(-columns // 128), 128)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        else:
            groups = weight.view(len(weight), -1, weights["group_size"])
            low, high = groups.amin(-1), groups.amax(-1)
            if strategy == "tensor_group":
                whole = (6 * 448 / weight.abs().amax()).float()[None]
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        if scale.is_floating_point() and scale.dtype == torch.float32 and args.type == "int":
            scale = scale.half().float()
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        if whole is not None:
            state["weight_global_scale"] = whole
        tensors = compressor.compress(state, scheme)
        meant = compressor.decompress(tensors, scheme)["weight"]
        if inputs is not None and not inputs.get("dynamic"):
            tensors["input_scale"] = torch.tensor([0.05])
        stored = {name: t.detach() for name, t in tensors.items() if t is not None}
        return stored, meant.detach()

    return config, write
