"""Reads and checks the config.json settings that models share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.protocol.errors import ConfigError, ModelError


def read_int(raw: Mapping[str, Any], name: str, default: int | None = None, low: int = 1) -> int:
    """An integer of a config.json, at least `low`; `default` if missing or null."""
    value = raw.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ModelError(
            f"config.json: {name} must be an integer of at least {low}, got {value!r:.80}"
        )
    if value >= 2**31:
        raise ModelError(
            f"config.json: {name} must be below 2**31, got an integer of {value.bit_length()} bits"
        )
    return value


def read_float(raw: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number of a config.json; `default` if missing or null."""
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e15:
        raise ModelError(f"config.json: {name} must be a number, got {value!r:.80}")
    return float(value)


def read_num_labels(raw: Mapping[str, Any]) -> int:
    """The number of labels of a config.json's classifier."""
    by_id = raw.get("id2label")
    default = len(by_id) if isinstance(by_id, dict) and by_id else 2
    return read_int(raw, "num_labels", default)


def _read_eps(raw: Mapping[str, Any]) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon")
    name = next((name for name in names if raw.get(name) is not None), names[0])
    eps = raw.get(name, 1e-6)
    is_number = isinstance(eps, (int, float)) and not isinstance(eps, bool)
    if not is_number or not 0 <= eps < 1e15:
        raise ModelError(f"config.json: {name} must be a small number, got {eps!r:.80}")
    return float(eps)


def check_fixed(raw: Mapping[str, Any], **fixed: object) -> None:
    """Refuse settings of which only one value is supported. It is the default."""
    for name, value in fixed.items():
        given = raw.get(name)
        if given is not None and given != value:
            raise ModelError(
                f"config.json: {name} must be {value!r}, got {given!r:.80}: no other value is "
                "supported"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """The settings that all models share, under one set of names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    max_position: int
    raw: Mapping[str, Any]  # the whole config.json, for settings of single architectures

    @staticmethod
    def read_common(raw: Mapping[str, Any], max_position: int) -> dict[str, Any]:
        hidden_size, num_heads = read_int(raw, "hidden_size"), read_int(raw, "num_attention_heads")
        return {
            "vocab_size": read_int(raw, "vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": read_int(raw, "intermediate_size"),
            "num_layers": read_int(raw, "num_hidden_layers"),
            "num_heads": num_heads,
            "head_dim": read_int(raw, "head_dim", hidden_size // num_heads),
            "max_position": read_int(raw, "max_position_embeddings", max_position),
            "raw": raw,
        }

    def check_shards(self, ranks: int) -> None:
        """Refuse a tensor-parallel size that does not divide the model."""
        if self.num_heads % ranks or self.intermediate_size % ranks:
            raise ConfigError(
                f"tensor_parallel_size must divide the model's {self.num_heads} attention heads "
                f"and its intermediate size of {self.intermediate_size}, got {ranks}"
            )


@dataclass(frozen=True)
class DecoderConfig(TransformerConfig):
    num_kv_heads: int
    rms_norm_eps: float  # also of layer norms, whatever the file calls it
    tie_word_embeddings: bool

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        num_heads = read_int(raw, "num_attention_heads")
        num_kv_heads = read_int(raw, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        return cls(
            num_kv_heads=num_kv_heads,
            rms_norm_eps=_read_eps(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            **cls.read_common(raw, max_position=2048),
        )

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a windowed layer sees; None without a window."""
        if self.raw.get("sliding_window") is None:
            return None
        return read_int(self.raw, "sliding_window")

    def check_shards(self, ranks: int) -> None:
        super().check_shards(ranks)
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size must divide the model's {self.num_kv_heads} key-value "
                f"heads, or be a multiple of them, got {ranks}"
            )


def read_head(raw: Mapping[str, Any], ranks: int, kind: str) -> DecoderConfig:
    """The settings of a draft head, which has one layer."""
    config = DecoderConfig.from_raw(raw)
    if config.num_layers != 1:
        raise ModelError(
            f"config.json: num_hidden_layers of an {kind} head must be 1, got {config.num_layers}"
        )
    config.check_shards(ranks)
    return config


def layer_kind(config: TransformerConfig, index: int, *kinds: str) -> str | None:
    """The entry of `layer_types` for layer `index`, one of `kinds`; None without the list."""
    given = config.raw.get("layer_types")
    if given is None:
        return None
    known = isinstance(given, list) and all(kind in kinds for kind in given)
    if not known or len(given) != config.num_layers:
        raise ModelError(
            f"config.json: layer_types must name {' or '.join(kinds)} for each of "
            f"{config.num_layers} layers, got {given!r:.80}"
        )
    return str(given[index])
