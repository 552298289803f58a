"""Reads the settings of a LoRA adapter: ranks, scalings, and what is not supported.

Which modules an adapter changes is decided by its tensors, not by `target_modules` and its
relatives: those say what peft was told to train.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.protocol.errors import AdapterError

# Settings under which an adapter is more than a sum, by name, and what to do about it.
_UNSUPPORTED = {
    "alora_invocation_tokens": "activated LoRA changes the weights in the middle of a prompt",
    "arrow_config": "routing between adapters",
    "kasa_config": "KaSA",
    "layer_replication": "repeated layers are another model",
    "megatron_config": "Megatron's layers",
    "monteclora_config": "MonteCLoRA",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QA-LoRA",
}
# Initializations that change the base's weights. The adapter fits only the changed ones.
_CHANGES_BASE = re.compile(r"pissa(_niter_\d+)?|olora|corda|loftq|lora_ga", re.IGNORECASE)
_MAX_PATTERN_LENGTH = 1000
_MAX_UNBOUNDED = 3  # repetitions in a pattern; matching takes a power of the name's length
_MAX_OPTIONAL = 4
_MAX_RANK = 2**20


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter's settings. Patterns are matched against peft's names of modules."""

    alpha: float
    rank: int | None = None  # of modules without an entry in `rank_pattern`; None: unknown
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    token_indices: Mapping[str, list[int]] | list[int] | None = None

    def rank_of(self, module: str) -> int | None:
        return self.rank_pattern.get(_key(self.rank_pattern, module), self.rank)

    def scaling_of(self, module: str, rank: int) -> float:
        alpha = self.alpha_pattern.get(_key(self.alpha_pattern, module), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def tokens_of(self, module: str) -> list[int] | None:
        """The ids of trained tokens in an embedding."""
        if not isinstance(self.token_indices, Mapping):
            return self.token_indices
        matching = (
            tokens
            for name, tokens in self.token_indices.items()
            if module == name or module.endswith(f".{name}")
        )
        return next(matching, None)


def parse_config(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    """The settings in adapter_config.json. Raises AdapterError, which names the field."""
    peft_type = raw.get("peft_type")
    if peft_type != "LORA":
        raise AdapterError(
            f"{path}: peft_type must be LORA, got {peft_type!r:.80}: other kinds of adapters are "
            "not supported; merge it into the model with peft (merge_and_unload) if it can be"
        )
    for name, what in _UNSUPPORTED.items():
        if raw.get(name):
            raise AdapterError(f"{path}: {name} is set, which is not supported: {what}")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and _CHANGES_BASE.fullmatch(start):
        raise AdapterError(
            f"{path}: init_lora_weights {start!r} changed the base's weights before training: save "
            "the adapter with peft's path_initial_model_for_weight_conversion, which makes it fit "
            "the original ones"
        )
    return AdapterConfig(
        alpha=_number(raw, "lora_alpha", 8, path),
        rank=_rank(raw.get("r", 8), "r", path),
        rank_pattern={
            key: _rank(value, f"rank_pattern[{key!r:.80}]", path)
            for key, value in _patterns(raw, "rank_pattern", path).items()
        },
        alpha_pattern={
            key: _number({key: value}, key, 0, path)
            for key, value in _patterns(raw, "alpha_pattern", path).items()
        },
        use_rslora=raw.get("use_rslora") is True,
        use_dora=raw.get("use_dora") is True,
        token_indices=_token_indices(raw.get("trainable_token_indices"), path),
    )


def _key(patterns: Mapping[str, Any], module: str) -> str:
    """The first of the patterns that matches the end of a module's name, as peft chooses it."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return pattern
    return module


def _patterns(raw: Mapping[str, Any], field: str, path: Path) -> dict[str, Any]:
    patterns = raw.get(field) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{path}: {field} must be an object, got {patterns!r:.80}")
    for pattern in patterns:
        _check_pattern(pattern, field, path)
    return patterns


def _check_pattern(pattern: str, field: str, path: Path) -> None:
    """Refuse expressions that are invalid, or that could take long to match.

    Only a repeated group, or many repetitions, can: matching would stop the engine meanwhile.
    """
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(
            f"{path}: {field} has {pattern!r:.80}, which is no regular expression: {error}"
        ) from error
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "x", re.sub(r"\\.", "x", pattern))
    plain = re.sub(r"\(\?(?:[:=!]|<[=!]|P?<\w+>)", "(", plain)
    if (
        len(pattern) > _MAX_PATTERN_LENGTH
        or re.search(r"\)[*+{]", plain)
        or len(re.findall(r"[*+{]", plain)) > _MAX_UNBOUNDED
        or plain.count("?") > _MAX_OPTIONAL
    ):
        raise AdapterError(
            f"{path}: {field} has {pattern!r:.80}, which is too complex to match safely: use at "
            f"most {_MAX_UNBOUNDED} repetitions, and none of a group"
        )


def _rank(value: Any, field: str, path: Path) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise AdapterError(
            f"{path}: {field} must be an integer from 1 to {_MAX_RANK}, got {value!r:.80}"
        )
    return value


def _number(raw: Mapping[str, Any], field: str, default: float, path: Path) -> float:
    value = raw.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise AdapterError(f"{path}: {field:.80} must be a finite number, got {value!r:.80}")
    return float(value)


def _token_indices(raw: Any, path: Path) -> dict[str, list[int]] | list[int] | None:
    if raw is None:
        return None
    lists = list(raw.values()) if isinstance(raw, dict) else [raw]
    for tokens in lists:
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise AdapterError(
                f"{path}: trainable_token_indices must list token ids, got {raw!r:.80}"
            )
    return raw if isinstance(raw, dict) else list(raw)
