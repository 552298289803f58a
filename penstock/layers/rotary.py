"""Rotary position embedding (RoPE), and how checkpoints scale it to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.protocol.errors import ModelError

SUPPORTED = ("default", "linear", "dynamic", "llama3", "longrope", "ntk", "yarn")
NUMBERS = (
    "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
    "mscale", "mscale_all_dim",
)  # fmt: skip
LARGEST = {  # far above any model; larger values are mistakes in the file
    "factor": 1e6,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": float(2**31 - 1),
}
LARGEST_OTHER = 1e15


class Rotary(nn.Module):
    """The angles of every position a model can reach, computed once in float32.

    Dimensions i and i + rotary_dim / 2 rotate together, or 2i and 2i + 1 if the model interleaves
    them.
    """

    def __init__(
        self,
        build: Build,
        head_dim: int,
        max_position: int,
        parameters: Mapping[str, Any],
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.interleaved = interleaved
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        frequencies, attention_factor = rotary_frequencies(
            rotary_dim, parameters, max_position, build.max_model_len
        )
        if 2 * frequencies.shape[-1] > head_dim:
            raise ModelError(
                f"config.json: the {head_dim} dimensions of a head cannot all rotate in pairs: "
                f"their number must be even"
            )
        # One table, so that a step gathers once: [length, rotary_dim], cosines then sines.
        if build.device.type == "meta":  # whose arithmetic imports torch's compiler, for 0.7 s
            size = (build.max_model_len, 2 * frequencies.shape[-1])
            self.table = torch.empty(size, dtype=build.dtype, device=build.device)
            return
        # On the host, whose cosines are the same everywhere.
        positions = torch.arange(build.max_model_len, dtype=torch.float32)
        angles = positions[:, None] * frequencies
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor
        self.table = table.to(build.dtype).to(build.device)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [n, 1, rotary_dim / 2] of positions [n], looked up once per step."""
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        return cos, sin

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate query and key [n, heads, head_dim], which may be changed in place.

        Interleaved dimensions are returned in halves layout. Only products of queries with keys are
        used, and those do not change.
        """
        if self.interleaved:
            query, key = self._to_halves(query), self._to_halves(key)
        return self.ops.rotate_pair(query, key, *angles)

    def _to_halves(self, x: torch.Tensor) -> torch.Tensor:
        rotary_dim = self.table.shape[-1]
        rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        return torch.cat([rotated[..., 0::2], rotated[..., 1::2], rest], dim=-1)


class MRotary(Rotary):
    """Rotary embedding over time, height and width (M-RoPE): each has some of the dimensions.

    Text has the same position in all three, for which the plain angles are right.
    """

    def __init__(
        self,
        build: Build,
        head_dim: int,
        max_position: int,
        parameters: Mapping[str, Any],
        interleaved: bool = False,
    ) -> None:
        super().__init__(build, head_dim, max_position, parameters, interleaved)
        sections, half = parameters.get("mrope_section"), self.table.shape[-1] // 2
        is_list = isinstance(sections, list) and all(isinstance(x, int) for x in sections)
        if not is_list or len(sections or ()) != 3 or sum(sections or ()) != half:
            raise ModelError(
                f"config.json: mrope_section must be three integers whose sum is {half}, got "
                f"{sections!r:.80}"
            )
        assert sections is not None
        order = [axis for axis, size in enumerate(sections) for _ in range(size)]
        if parameters.get("mrope_interleaved"):  # time, height, width, time, ... as far as they go
            order = [0] * half
            for axis in (1, 2):
                for index in range(axis, min(3 * sections[axis], half), 3):
                    order[index] = axis
        at = self.table.device
        self.axes = torch.tensor(order, device=at)  # [rotary_dim / 2]: which position counts

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `Rotary`, of positions [n] or [3, n]."""
        if positions.dim() == 1:
            return super().angles(positions)
        cos, sin = self.table[positions].chunk(2, dim=-1)  # [3, n, rotary_dim / 2] each
        axes = self.axes.expand(1, cos.shape[1], -1)
        return cos.gather(0, axes)[0].unsqueeze(1), sin.gather(0, axes)[0].unsqueeze(1)


def rotary_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of a config.json, in the older (`rope_scaling`) or newer spelling."""
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name) or {}
        if not isinstance(given, Mapping):
            raise ModelError(f"config.json: {name} must be an object, got {given!r:.80}")
        parameters.update({key: value for key, value in given.items() if value is not None})
    theta = config.get("rope_theta")
    parameters.setdefault("rope_theta", 10000.0 if theta is None else theta)
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if config.get(name) is not None:
            parameters.setdefault(name, config[name])
    # The name of longrope in Phi-3's first files.
    is_old_longrope = parameters["rope_type"] == "yarn" and parameters.get("long_factor")
    if parameters["rope_type"] == "mrope":  # the frequencies are the plain ones
        parameters["rope_type"] = "default"
    if parameters["rope_type"] == "su" or is_old_longrope:
        parameters["rope_type"] = "longrope"
    if parameters["rope_type"] not in SUPPORTED:
        raise ModelError(
            f"rope_type {parameters['rope_type']!r} is not supported; supported: "
            f"{', '.join(SUPPORTED)}"
        )
    for name in NUMBERS:
        value = parameters.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        most = LARGEST.get(name, LARGEST_OTHER)
        if value is not None and not (is_number and 0 <= value <= most):
            raise ModelError(
                f"config.json: {name} of rope must be a number from 0 to {most:g}, "
                f"got {value!r:.80}"
            )
    least = 1 if parameters["rope_type"] == "yarn" else 0  # its logarithm is taken
    if parameters["rope_theta"] <= least:
        raise ModelError(
            f"config.json: rope_theta must be above {least}, got {parameters['rope_theta']}"
        )
    if parameters["rope_type"] == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            if not parameters.get(name):
                raise ModelError(f"config.json: rope_type llama3 needs {name}, which is missing")
    return parameters


def rotary_frequencies(
    dim: int, parameters: Mapping[str, Any], max_position: int, length: int
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [dim / 2], and the factor on cosines and sines.

    `longrope` has two sets of factors. A model that may exceed its trained length uses the long
    ones for every sequence, because a cached key must not depend on the final length.

    `dynamic` stretches with the sequence, so its frequencies are [length, dim / 2]. A position past
    the trained length gets those of a sequence that ends there. This matches a model that decodes
    token by token, and depends only on the position.
    """
    kind, base = parameters["rope_type"], float(parameters["rope_theta"])
    factor = float(parameters.get("factor") or 1.0)
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    if kind == "dynamic":
        if dim == 2:
            raise ModelError("config.json: rope_type dynamic needs more than 2 rotated dimensions")
        seq_len = torch.arange(1, length + 1, dtype=torch.float64).clamp(min=max_position)
        growth = (factor * seq_len / max_position - (factor - 1)) ** (dim / (dim - 2))
        return 1.0 / (base * growth[:, None]).float() ** exponent, 1.0
    if kind == "ntk":  # GTE's encoders: a larger base, and everything slowed down slightly
        return 1.0 / (base * factor) ** exponent / factor ** (2 / dim), 1.0
    inverse = 1.0 / base**exponent
    if kind == "linear":
        return inverse / factor, 1.0
    if kind == "llama3":
        return _llama3(inverse, factor, parameters, max_position), 1.0
    if kind == "yarn":
        return _yarn(inverse, base, dim, factor, parameters, max_position)
    if kind == "longrope":
        return _longrope(inverse, parameters, max_position, length)
    return inverse, 1.0


def _llama3(
    inverse: torch.Tensor, factor: float, parameters: Mapping[str, Any], max_position: int
) -> torch.Tensor:
    """Scale low frequencies, keep high ones, interpolate in between."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original = parameters.get("original_max_position_embeddings") or max_position
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    stretched = torch.where(wavelength > original / low, inverse / factor, inverse)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, stretched)


def _longrope(
    inverse: torch.Tensor, parameters: Mapping[str, Any], max_position: int, length: int
) -> tuple[torch.Tensor, float]:
    original = parameters.get("original_max_position_embeddings") or max_position
    name = "long_factor" if length > original else "short_factor"
    factors = parameters.get(name)
    is_list = isinstance(factors, list) and len(factors) == len(inverse)
    if not is_list or not all(isinstance(x, (int, float)) and 0 < x < 1e6 for x in factors or ()):
        raise ModelError(
            f"config.json: rope_type longrope needs {name}, a list of {len(inverse)} positive "
            f"numbers, got {factors!r:.80}"
        )
    stretch = float(parameters.get("factor") or max_position / original)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        grown = stretch > 1 and original > 1
        attention_factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if grown else 1.0
    return inverse / torch.tensor(factors, dtype=torch.float32), float(attention_factor)


def _yarn(
    inverse: torch.Tensor,
    base: float,
    dim: int,
    factor: float,
    parameters: Mapping[str, Any],
    max_position: int,
) -> tuple[torch.Tensor, float]:
    original = parameters.get("original_max_position_embeddings") or max_position

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(float(parameters.get("beta_fast") or 32.0))
    high = dimension_of(float(parameters.get("beta_slow") or 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch = ramp.clamp(0, 1)
    frequencies = inverse / factor * stretch + inverse * (1 - stretch)

    def magnitude(scale: float, mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, over_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and over_all:
            attention_factor = magnitude(factor, mscale) / magnitude(factor, over_all)
        else:
            attention_factor = magnitude(factor)
    return frequencies, float(attention_factor)
