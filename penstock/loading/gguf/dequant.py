"""Dequantizes the tensors of a GGUF file. `ops.gguf_blocks` knows the formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from penstock.loading.gguf.file import GGUFTensor
from penstock.ops.gguf_blocks import FORMATS, dequantize_blocks
from penstock.ops.gguf_grids import GRIDS, table
from penstock.protocol.errors import ModelError

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SUPPORTED_TYPES: tuple[str, ...] = (*FLOAT_DTYPES, *FORMATS)


def dequantize(
    tensor: GGUFTensor, data: npt.NDArray[np.uint8] | torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`tensor`, whose bytes are `data`, as float32 in its own shape.

    `out`, if given, is a contiguous float32 tensor of that shape, which is filled and returned.
    Raises ModelError for a format that is not in SUPPORTED_TYPES.
    """
    check_supported(tensor)
    source = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
    if out is None:
        out = torch.empty(tensor.shape, dtype=torch.float32, device=source.device)
    if tensor.type.name in FLOAT_DTYPES:
        out.copy_(source.view(FLOAT_DTYPES[tensor.type.name]).view(tensor.shape))
    else:
        dequantize_blocks(tensor.type.name, tensor.type.block_bytes, source, out.view(-1))
    return out


def check_supported(tensor: GGUFTensor, path: Path | None = None) -> None:
    """Raise ModelError if `tensor` (of the file `path`) cannot be dequantized.

    This includes types whose table is not installed.
    """
    where = "" if path is None else f"{path}: "
    if tensor.type.name in GRIDS:
        try:
            table(tensor.type.name)
        except ModelError as error:
            raise ModelError(f"{where}tensor {tensor.name!r}: {error}") from error
    if tensor.type.name not in SUPPORTED_TYPES:
        raise ModelError(
            f"{where}tensor {tensor.name!r} is of type {tensor.type.name}, which is not "
            f"supported; supported: {', '.join(SUPPORTED_TYPES)}: choose a file quantized to one "
            "of them"
        )
