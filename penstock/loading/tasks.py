"""What a model is for: text, or vectors; by its architecture and the files beside it."""

from __future__ import annotations

from typing import Literal

from penstock.config import EngineConfig
from penstock.loading.source import ModelSource

GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
CLASSIFYING = ("ForSequenceClassification", "ForTokenClassification", "RewardModel")
MODULES_FILE = "modules.json"  # sentence-transformers'

Task = Literal["generate", "embed", "classify"]


def choose_task(config: EngineConfig, source: ModelSource) -> Task:
    """What an engine with this configuration does with this model."""
    options, names = config.pooling, _names(source)
    if options.runner == "generate":
        return "generate"
    is_asked = options.convert != "auto" or options.pooler_config is not None
    if options.runner == "auto" and not is_asked and not _is_pooling_model(source, names):
        return "generate"
    if options.convert != "auto":
        return options.convert
    return "classify" if any(name.endswith(CLASSIFYING) for name in names) else "embed"


def _is_pooling_model(source: ModelSource, names: list[str]) -> bool:
    if source.path.is_dir() and (source.path / MODULES_FILE).exists():
        return True
    return bool(names) and not any(name.endswith(GENERATING) for name in names)


def _names(source: ModelSource) -> list[str]:
    names = source.config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
