"""Converts a GGUF file's rope scaling to config.json settings.

Files contain a table of divisors in place of Llama 3's scaling, which is recovered from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.loading.gguf.architecture import LONG_FACTORS, ROPE_FREQS, GGUFArchitecture
from penstock.loading.gguf.file import GGUFFile
from penstock.loading.gguf.metadata import Metadata, fail, find_tensor

_PUBLISHED = (4.0, 8192)  # high_freq_factor and original length of Llama 3.1 to 3.3


def rope_scaling(
    metadata: Metadata, config: Mapping[str, Any], architecture: GGUFArchitecture
) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json."""
    if ROPE_FREQS in metadata.file.tensors:
        return _llama3_scaling(metadata.file, config)
    kind = metadata.get("rope.scaling.type")
    if kind == "longrope" and LONG_FACTORS in metadata.file.tensors:
        return None  # in the architecture's settings
    if kind not in (None, "none", "linear", "yarn"):
        fail(
            metadata.file,
            f"{metadata.prefix}.rope.scaling.type {kind!r} is not supported; supported: none, "
            "linear, yarn, and Llama 3's table rope_freqs.weight",
        )
    if kind == "yarn":
        return _yarn_scaling(metadata, architecture)
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind is None and metadata.get("rope.scale_linear") is not None:  # files from 2023
        return {"rope_type": "linear", "factor": metadata.number("rope.scale_linear")}
    return None


def _yarn_scaling(metadata: Metadata, architecture: GGUFArchitecture) -> dict[str, Any]:
    factor = metadata.number("rope.scaling.factor")
    original = metadata.integer("rope.scaling.original_context_length")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for key in ("beta_fast", "beta_slow"):
        if metadata.get(f"rope.scaling.yarn_{key}") is not None:
            scaling[key] = metadata.number(f"rope.scaling.yarn_{key}")
    if not architecture.truncates_yarn:
        scaling["truncate"] = False
    if architecture.attention == "latent":
        scaling |= _latent_yarn(metadata)
    elif metadata.get("rope.scaling.yarn_attn_factor") is not None:
        scaling["attention_factor"] = metadata.number("rope.scaling.yarn_attn_factor")
    elif metadata.get("rope.scaling.attn_factor") is not None:
        # ggml multiplies YaRN's own factor with this; Hugging Face's key replaces that factor.
        own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor") * own
    return scaling


def _latent_yarn(metadata: Metadata) -> dict[str, Any]:
    """Latent attention scales scores, not the rotated part. The file has a tenth of the factor."""
    if not metadata.get("rope.scaling.yarn_log_multiplier"):
        return {"attention_factor": 1.0}
    over_all = 10 * metadata.number("rope.scaling.yarn_log_multiplier")
    return {"mscale": over_all, "mscale_all_dim": over_all}


def _llama3_scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    tensor = find_tensor(file, ROPE_FREQS, num_dims=1)
    half = config["head_dim"] // 2
    if tensor.type.name != "F32" or tensor.shape != (half,):
        fail(
            file,
            f"tensor {ROPE_FREQS!r} must be F32 of shape [{half}], "
            f"got {tensor.type.name} of {list(tensor.shape)}",
        )
    scaling = fit_llama3_scaling(file.view(ROPE_FREQS).view("<f4"), config["rope_theta"])
    if scaling is None:
        fail(file, f"tensor {ROPE_FREQS!r} is not a table of Llama 3's rope scaling")
    return scaling


def fit_llama3_scaling(divisors: npt.NDArray[Any], rope_theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` whose frequencies are divided by `divisors`, [head_dim / 2].

    None if there is none: the table is not Llama 3's.
    """
    divisors = divisors.astype(np.float64)
    if not np.isfinite(divisors).all() or (divisors < 0.999).any():
        return None
    factor = round(float(divisors.max()), 4)
    if factor <= 1:
        return None
    half = len(divisors)
    turns = rope_theta ** (-np.arange(half) / half) / (2 * math.pi)  # per token: 1 / wavelength
    if np.isin(divisors, (1.0, divisors.max())).all():
        return _step(divisors, turns, factor)
    for candidate in (_PUBLISHED, _regress(divisors, turns, factor)):
        if candidate is None:
            continue
        high, original = candidate
        smooth = np.clip((turns * original - 1) / (high - 1), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None


def _step(
    divisors: npt.NDArray[np.float64], turns: npt.NDArray[np.float64], factor: float
) -> dict[str, Any] | None:
    """Llama 4's scaling: high frequencies are kept, low ones scaled, with nothing in between.

    Every length between the wavelengths on both sides of the step is equivalent to the original.
    """
    is_slow = divisors > 1
    first = int(is_slow.argmax())
    if not is_slow[first:].all():
        return None
    low = 1 / turns[first - 1] if first else 0.5 / turns[0]
    high = 1 / turns[first]
    original = _PUBLISHED[1] if low < _PUBLISHED[1] < high else math.ceil(math.sqrt(low * high))
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": original,
    }


def _regress(
    divisors: npt.NDArray[np.float64], turns: npt.NDArray[np.float64], factor: float
) -> tuple[float, int] | None:
    """`high_freq_factor` and original length, from the slope between the two plateaus.

    There, smooth = (turns * original - low) / (high - low). Only the ratios of the three matter, so
    low is 1, as in every published model.
    """
    between = (divisors > 1.0001) & (divisors < factor * 0.9999)
    if np.count_nonzero(between) < 2:
        return None
    smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    slope, intercept = np.polyfit(smooth, turns[between], 1)
    if intercept < 2.0**-31 or slope <= 0:
        return None
    high = round(float(slope / intercept) + 1, 3)
    return (high, round(float(1 / intercept))) if high > 1 else None
