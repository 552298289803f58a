"""Whether a model generates or pools, and how it pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from penstock.config.options import naming_option, option
from penstock.config.vllm_names import KEYS, leave_out_keys
from penstock.protocol.errors import ConfigError
from penstock.protocol.pooling import PoolingType

POOLER_KEYS: dict[str, str] = {
    "pooling_type": "CLS, LAST, MEAN, ALL or STEP",
    "use_activation": "true or false",
    "dimensions": "a list of the lengths that embeddings may be cut to",
    "classifier_from_token": "a list of tokens whose logits are the labels'",
    "score_template": "a text with {query} and {document}, and {instruction} if that counts",
    "step_tag_id": "a token id: rewards are those of the places where it stands",
    "returned_token_ids": "a list of token ids whose logits are the labels'",
    "enable_chunked_processing": "true or false: embed longer texts in pieces, with max_embed_len",
    "max_embed_len": "a number of tokens that such a text may have",
}


@dataclass(frozen=True)
class PoolingConfig:
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto",
        "What the model does. generate: text; pooling: embeddings, classes or scores; auto: by "
        "its architecture, or pooling if it has sentence-transformers files.",
    )
    convert: Literal["auto", "embed", "classify"] = option(
        "auto",
        "What a pooling model returns. auto: classes if its architecture has a classifier, "
        "otherwise embeddings.",
    )
    pooler_config: dict[str, Any] | None = option(
        None,
        'Pooler settings as JSON, such as {"pooling_type": "MEAN"}. Keys: '
        + ", ".join(POOLER_KEYS)
        + "; default: from the model's files.",
    )

    def __post_init__(self) -> None:
        given = self.pooler_config or {}
        with naming_option("pooler_config"):
            known = leave_out_keys(given, KEYS["pooler_config"])
        for key, value in known.items():
            if key not in POOLER_KEYS:
                raise ConfigError(
                    f"pooler_config must not contain {key!r}: it may contain "
                    f"{', '.join(POOLER_KEYS)}"
                )
            if not _fits(key, value):
                raise ConfigError(
                    f"pooler_config: {key} must be {POOLER_KEYS[key]}, got {value!r:.80}"
                )
        if bool(given.get("enable_chunked_processing")) != ("max_embed_len" in given):
            raise ConfigError(
                "pooler_config: enable_chunked_processing and max_embed_len must be set together: "
                '{"enable_chunked_processing": true, "max_embed_len": 100000}'
            )
        is_by_token = given.get("pooling_type", "ALL") in ("ALL", "STEP")
        if "step_tag_id" in given and not is_by_token:
            raise ConfigError(
                "pooler_config: step_tag_id needs a result for each token: leave pooling_type out, "
                f"or set it to STEP, not {given['pooling_type']}"
            )
        if given.get("pooling_type") == "STEP" and "step_tag_id" not in given:
            raise ConfigError("pooler_config: pooling_type STEP needs a step_tag_id")
        if "returned_token_ids" in given and "classifier_from_token" in given:
            raise ConfigError(
                "pooler_config: returned_token_ids and classifier_from_token both name the tokens "
                "whose logits are labels: drop one"
            )
        if self.runner == "generate" and (given or self.convert != "auto"):
            raise ConfigError("convert and pooler_config are for runner=pooling: drop them")


def _fits(key: str, value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if key == "pooling_type":
        return value in (*get_args(PoolingType), "STEP")
    if key in ("use_activation", "enable_chunked_processing"):
        return isinstance(value, bool)
    if key == "dimensions":
        return isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
    if key == "returned_token_ids":
        is_list = isinstance(value, list) and bool(value)
        return is_list and all(type(n) is int and n >= 0 for n in value)  # type: ignore[attr-defined]
    if key == "classifier_from_token":
        is_list = isinstance(value, list) and bool(value)
        return is_list and all(isinstance(token, str) for token in value)  # type: ignore[attr-defined]
    if key == "score_template":
        return isinstance(value, str) and "{query}" in value and "{document}" in value
    return is_number and value >= (1 if key == "max_embed_len" else 0)  # type: ignore[operator]
