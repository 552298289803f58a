"""Llama 3's rope scaling, back from the table of divisors that GGUF files carry in its place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

_PUBLISHED = (4.0, 8192)  # high_freq_factor and original length of Llama 3.1 to 3.3


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
    turns = rope_theta ** (-np.arange(half) / half) / (2 * math.pi)  # a token: 1 / wavelength
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


def _regress(
    divisors: npt.NDArray[np.float64], turns: npt.NDArray[np.float64], factor: float
) -> tuple[float, int] | None:
    """`high_freq_factor` and original length, from the slope between the two plateaus.

    There, smooth = (turns * original - low) / (high - low). Only the ratios of the three matter,
    so low is 1, as in every published model.
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
