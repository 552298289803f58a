"""Drafters in the format of the speculators library, which name the model that they draft for.

Such a folder can be given as the engine's `model`. The engine then loads its verifier.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.config import EngineConfig, SpeculativeConfig
from penstock.config.speculative import MOST_TOKENS
from penstock.loading.source import ModelSource, resolve_source
from penstock.protocol.errors import ConfigError, ModelError

TYPE = "speculators_model_type"
METHODS = {"eagle": "eagle", "eagle3": "eagle3"}  # by type

logger = logging.getLogger(__name__)


def find_model(config: EngineConfig) -> tuple[EngineConfig, ModelSource]:
    """The files of the model that an engine runs, and the engine's configuration.

    If `model` is a drafter of the speculators library, the model is the verifier that it names, and
    `speculative_config` is filled in. Raises ConfigError or ModelError.
    """
    source = resolve_source(config.model, config.load)
    name = config.model.model
    if TYPE not in source.config:
        method = head_method(source.config)
        if method is not None:
            raise ConfigError(
                f"model: {name} is a draft head. Use the model that it was trained for, with "
                f'speculative_config {{"method": "{method}", "model": "{name}"}}'
            )
        return config, source
    method, verifier = method_of(source.config), _verifier_of(name, source.config)
    if config.speculative.speculative_config is not None:
        raise ConfigError(
            f"speculative_config: the model {name} is a drafter with settings of its own: drop "
            f"speculative_config, or use model {verifier} with this drafter as its model"
        )
    # The path, because a revision was the drafter's.
    settings: dict[str, Any] = {"method": method, "model": str(source.path)}
    num_tokens = _num_tokens(source.config)
    if num_tokens is not None:
        settings["num_speculative_tokens"] = num_tokens
    model = replace(
        config.model, model=verifier, revision=None, served_model_name=config.model.names
    )
    found = replace(config, model=model, speculative=SpeculativeConfig(settings))
    logger.info("%s drafts for %s, which is the model that runs", name, verifier)
    try:
        return found, resolve_source(found.model, found.load)
    except ModelError as error:
        raise ModelError(
            f"the verifier of the drafter {name} cannot be loaded: {error}. If it is elsewhere, "
            f'use it as model, with speculative_config {{"method": "{method}", "model": "{name}"}}'
        ) from error


def head_method(settings: Mapping[str, Any]) -> str | None:
    """The method of an EAGLE or Medusa head, by the architectures in its config.json.

    None for other models, and for heads without a name of their own.
    """
    names = settings.get("architectures")
    if names is None and "medusa_num_heads" in settings:  # as the Medusa authors write it
        return "medusa"
    text = " ".join(map(str, names)).lower() if isinstance(names, list) else ""
    return next((method for method in ("eagle3", "eagle", "medusa") if method in text), None)


def method_of(settings: Mapping[str, Any]) -> str:
    """The speculative method of a drafter, by its config.json. Raises ModelError."""
    kind = settings.get(TYPE)
    if not isinstance(kind, str) or kind not in METHODS:
        raise ModelError(
            f"config.json: {TYPE} {kind!r:.80} is not supported, only {' and '.join(METHODS)}"
        )
    return METHODS[kind]


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A head's config.json with all settings on one level, as the EAGLE authors write it.

    Raises ModelError for types that are not supported.
    """
    flat = dict(settings)
    inner = flat.pop("transformer_layer_config", None)
    if isinstance(inner, dict):
        flat = {**inner, **flat}
    if TYPE in flat:
        method_of(flat)
    return flat


def _verifier_of(name: str, settings: Mapping[str, Any]) -> str:
    inner = settings.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, dict) else None
    found = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(found, str) or not found:
        raise ModelError(
            f"{name} is a drafter, and its config.json names no model "
            "(speculators_config.verifier.name_or_path): use the model that it drafts for, with "
            "this drafter as model in speculative_config"
        )
    return found


def _num_tokens(settings: Mapping[str, Any]) -> int | None:
    """How many drafts the drafter was trained for, if its config.json says so."""
    proposals = settings["speculators_config"].get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    found = first.get("speculative_tokens") if isinstance(first, dict) else None
    if found is not None and (type(found) is not int or not 1 <= found <= MOST_TOKENS):
        raise ModelError(
            "config.json: speculators_config.proposal_methods.speculative_tokens must be an "
            f"integer from 1 to {MOST_TOKENS}, got {found!r:.80}"
        )
    return found
