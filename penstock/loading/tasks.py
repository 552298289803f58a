"""Decides a model's task, text or vectors, from its architecture and files."""

from __future__ import annotations

from typing import Literal

from penstock.config import EngineConfig
from penstock.loading.source import ModelSource

GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
CLASSIFYING = ("ForSequenceClassification", "ForTokenClassification", "RewardModel")
# By architecture: what the names of these models contain.
QWEN3_RERANKERS = {
    "Qwen3ForCausalLM": "qwen3-reranker",
    "Qwen3VLForConditionalGeneration": "qwen3-vl-reranker",
}

Task = Literal["generate", "embed", "classify"]


def choose_task(config: EngineConfig, source: ModelSource) -> Task:
    """The task of an engine with this configuration and model."""
    options, names = config.pooling, _names(source)
    if options.runner == "generate":
        return "generate"
    is_asked = options.convert != "auto" or options.pooler_config is not None
    if options.runner == "auto" and not is_asked and not _is_pooling_model(source, names):
        return "generate"
    if options.convert != "auto":
        return options.convert
    if label_tokens(config, source) is not None:
        return "classify"
    return "classify" if any(name.endswith(CLASSIFYING) for name in names) else "embed"


def label_tokens(config: EngineConfig, source: ModelSource) -> object:
    """The tokens whose logits are labels, for a language model that classifies by its answer.

    A list of texts or IDs, or whatever config.json has in its place; None for other models.
    """
    options = config.pooling.pooler_config or {}
    given = options.get("returned_token_ids", options.get("classifier_from_token"))
    if given is None and is_qwen3_reranker(source):
        given = ["no", "yes"]
    return source.config.get("classifier_from_token") if given is None else given


def is_qwen3_reranker(source: ModelSource) -> bool:
    """Whether the model is a Qwen3 reranker. Only its name says so."""
    names = (source.name, str(source.config.get("_name_or_path", "")))
    return any(
        architecture in _names(source) and any(part in name.lower() for name in names)
        for architecture, part in QWEN3_RERANKERS.items()
    )


def _is_pooling_model(source: ModelSource, names: list[str]) -> bool:
    if source.modules_folder is not None:
        return True
    if is_qwen3_reranker(source):
        return True
    return bool(names) and not any(name.endswith(GENERATING) for name in names)


def _names(source: ModelSource) -> list[str]:
    names = source.config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
