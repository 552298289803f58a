"""Speculative decoding: which drafter proposes tokens, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from penstock.config.options import naming_option, option, options_of, parse_keys, require
from penstock.config.quantization import check_option
from penstock.protocol.errors import ConfigError

Method = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "custom"]

NUM_TOKENS: Mapping[Method, int] = {  # unless the user says; mtp: the number of its layers
    "ngram": 5,
    "suffix": 8,
    "draft_model": 3,
    "eagle": 3,
    "eagle3": 3,
    "medusa": 3,
    "custom": 3,
}
MOST_TOKENS = 64  # drafts of a request in one step
LONGEST_LOOKUP = 32  # tokens; every length is indexed
DEEPEST_TREE = 256  # tokens

# Keys that only some methods read. All others have the rest.
_ONLY_FOR: Mapping[str, tuple[Method, ...]] = {
    "model": ("draft_model", "eagle", "eagle3", "medusa", "custom"),
    "quantization": ("draft_model",),
    "draft_tensor_parallel_size": ("draft_model", "eagle", "eagle3", "medusa"),
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
}
# Methods by which the last pipeline stage embeds what it drafts.
READS_EMBEDDING = ("eagle", "eagle3", "mtp")
# vLLM's methods that have another name here.
_FOREIGN_METHODS: Mapping[str, str] = {
    "ngram_gpu": "ngram",
    "custom_class": "custom",
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "glm4_moe_lite_mtp": "mtp",
    "mimo_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
# What `model` names, for methods that do not work without one.
_NEEDED_MODELS: Mapping[Method, str] = {
    "draft_model": "a smaller model to draft with",
    "eagle": "a head that was trained for the target",
    "eagle3": "a head that was trained for the target",
    "medusa": "heads that were trained for the target",
    "custom": '"module:Class" of a drafter',
}


@dataclass(frozen=True)
class SpeculativeSettings:
    """The keys of `speculative_config`."""

    method: Method = option(
        dataclasses.MISSING,
        "Drafter to use; required. ngram: repeats what followed the last tokens earlier in the "
        "request; suffix: what most often followed them, in the request and in past outputs; "
        "draft_model: a smaller model with the same vocabulary; eagle, eagle3: an EAGLE or EAGLE-3 "
        "head that was trained for the model; mtp: the multi-token-prediction (MTP) layers of the "
        "model's own checkpoint; medusa: Medusa heads that were trained for the model; custom: a "
        "class of your own.",
    )
    num_speculative_tokens: int | None = option(
        None,
        f"Maximum drafts per request and step, from 1 to {MOST_TOKENS}; default: "
        + ", ".join(f"{count} for {method}" for method, count in NUM_TOKENS.items())
        + ", the number of MTP layers for mtp.",
    )
    adaptive: bool = option(
        True,
        "Propose and verify fewer drafts, or none, where more would lower the throughput: by the "
        "load, measured step times and each request's acceptance.",
    )
    model: str | None = option(
        None,
        "draft_model, eagle, eagle3, medusa: the drafting model, named like `model` of the engine. "
        "custom: the drafter as module:Class, a subclass of penstock.runner.drafter.Drafter.",
    )
    quantization: str | None = option(
        None, "draft_model: like `quantization` of the engine, for the draft model."
    )
    draft_tensor_parallel_size: int | None = option(
        None,
        "draft_model, eagle, eagle3, medusa: ranks that share the drafter's layers: "
        "tensor_parallel_size (the default), or 1 to compute all of them on every rank, which "
        "saves communication.",
    )
    prompt_lookup_min: int = option(
        2, "ngram: minimum number of last tokens that must have occurred before."
    )
    prompt_lookup_max: int = option(
        5, "ngram: maximum number of last tokens that are compared. The longest match wins."
    )

    suffix_decoding_max_tree_depth: int = option(
        24, "suffix: maximum length of a match and its drafts together, in tokens."
    )
    suffix_decoding_max_cached_requests: int = option(
        10_000,
        "suffix: maximum number of past outputs to search, oldest out first; 0: only the request "
        "itself. Requests see only outputs of their own `cache_salt`.",
    )
    suffix_decoding_max_spec_factor: float = option(
        4.0, "suffix: maximum number of drafts per matched token."
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "suffix: minimum estimated probability of a draft, from 0 to 1."
    )

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SpeculativeSettings:
        """Raises `ConfigError`, which names the key."""
        method = given.get("method")
        if isinstance(method, str) and method in _FOREIGN_METHODS:
            raise ConfigError(f"method {method} is called {_FOREIGN_METHODS[method]} here")
        values = parse_keys(cls, given, "speculative_config")
        if "method" not in values:
            raise ConfigError(f"method is missing: choose one of {', '.join(get_args(Method))}")
        for key in values:
            methods = _ONLY_FOR.get(key)
            if methods is not None and values["method"] not in methods:
                raise ConfigError(
                    f"{key} is for method {', '.join(methods)}, got method {values['method']}: "
                    f"drop {key}"
                )
        # A bound that was given alone moves the other one's default.
        if "prompt_lookup_min" in values:
            values.setdefault("prompt_lookup_max", max(values["prompt_lookup_min"], 5))
        elif "prompt_lookup_max" in values:
            values["prompt_lookup_min"] = max(min(values["prompt_lookup_max"], 2), 1)
        return cls(**values)

    def __post_init__(self) -> None:
        require(self, "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", least=1)
        asked = self.num_speculative_tokens
        if asked is not None and asked > MOST_TOKENS:
            raise ConfigError(f"num_speculative_tokens must be at most {MOST_TOKENS}, got {asked}")
        if self.prompt_lookup_max > LONGEST_LOOKUP:
            raise ConfigError(
                f"prompt_lookup_max must be at most {LONGEST_LOOKUP}, got {self.prompt_lookup_max}"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        depth = self.suffix_decoding_max_tree_depth
        if not 2 <= depth <= DEEPEST_TREE:
            raise ConfigError(
                f"suffix_decoding_max_tree_depth must be from 2 to {DEEPEST_TREE}, got {depth}"
            )
        require(self, "suffix_decoding_max_cached_requests", least=0)
        require(self, "suffix_decoding_max_spec_factor", above=0)
        if not 0 <= self.suffix_decoding_min_token_prob <= 1:
            raise ConfigError(
                "suffix_decoding_min_token_prob must be from 0 to 1, "
                f"got {self.suffix_decoding_min_token_prob}"
            )
        wanted = _NEEDED_MODELS.get(self.method)
        if wanted is not None and self.model is None:
            raise ConfigError(f"method {self.method} needs model: {wanted}")
        if self.quantization is not None:
            check_option(self.quantization)

    @property
    def num_tokens(self) -> int:
        """Maximum drafts of a request in one step. Method mtp knows its own default."""
        asked = self.num_speculative_tokens
        return NUM_TOKENS[self.method] if asked is None else asked


@dataclass(frozen=True)
class SpeculativeConfig:
    speculative_config: dict[str, Any] | None = option(
        None,
        'Speculative decoding settings as JSON, such as {"method": "ngram"}. Keys: '
        + ", ".join(key.name for key in options_of(SpeculativeSettings))
        + "; see docs/speculation.md. Default: off.",
    )

    def __post_init__(self) -> None:
        with naming_option("speculative_config"):
            _ = self.settings

    def check_ranks(self, num_ranks: int) -> None:
        """Raise `ConfigError` unless a drafter works with so many ranks."""
        size = None if self.settings is None else self.settings.draft_tensor_parallel_size
        if size not in (None, 1, num_ranks):
            others = "" if num_ranks == 1 else f" or {num_ranks}, the tensor_parallel_size"
            raise ConfigError(
                f"speculative_config: draft_tensor_parallel_size must be 1{others}, got {size}"
            )

    @property
    def settings(self) -> SpeculativeSettings | None:
        """None: no speculation."""
        if self.speculative_config is None:
            return None
        return SpeculativeSettings.parse(self.speculative_config)
