"""Decides which class runs an architecture. Imports a model only when it is needed."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from penstock.models.architectures import ARCHITECTURES, DUAL_ENCODERS, ENCODERS, VISION
from penstock.models.plugins import FoundPlugin, find_plugins, plugin_models
from penstock.protocol.errors import ModelError

if TYPE_CHECKING:
    from penstock.layers.build import Build
    from penstock.models.base import Model
    from penstock.models.decoder import DecoderLM

logger = logging.getLogger(__name__)

HERE = {**ARCHITECTURES, **ENCODERS, **VISION, **DUAL_ENCODERS}
ModelImpl = Literal["auto", "penstock", "transformers"]
_HEADS = re.compile(
    r"(For(SequenceClassification|TokenClassification|(Process)?RewardModel)|Model)$"
)


def build_model(raw: Mapping[str, Any], build: Build, model_impl: ModelImpl = "auto") -> Model:
    """The model that a config.json describes, without weights.

    Unknown architectures run on transformers' code, if it knows them and `model_impl` permits. With
    `model_impl` transformers, all architectures do.
    """
    names = raw.get("architectures")
    if not build.generates:
        names = [*_strings(names), *_bases(_strings(names))]
    # Only if necessary: importing transformers takes longer than loading a small model.
    plugins = find_plugins()
    is_theirs = model_impl == "transformers" or (
        model_impl == "auto" and not is_known(names, plugins)
    )
    theirs = find_in_transformers(names) if is_theirs else None
    if theirs is not None:
        from penstock.models.transformers_model import TransformersLM  # needs the package

        if build.mesh.pp.size > 1:
            raise ModelError(_without_stages(theirs))
        logger.info("%s runs on transformers' implementation, with Penstock's attention", theirs)
        return TransformersLM(build, theirs, raw).eval()
    if model_impl == "transformers":
        raise ModelError(
            f"config.json: architectures {names!r:.200}: model_impl=transformers needs "
            + (
                "a class for causal language models that transformers has"
                if has_transformers()
                else "transformers: pip install 'penstock[transformers]'"
            )
        )
    model_class = find_model(names, plugins)
    if build.mesh.pp.size > 1 and not model_class.has_stages:
        raise ModelError(_without_stages(model_class.__name__))
    return model_class.create(build, raw).eval()


def _without_stages(name: str) -> str:
    return (
        f"{name} cannot be divided into pipeline stages: use tensor_parallel_size instead of "
        "pipeline_parallel_size"
    )


def _bases(names: list[str]) -> list[str]:
    """The language models that these architectures are, with another head or none."""
    heads = ("ForCausalLM", "ForConditionalGeneration")
    found = [(name, _HEADS.sub(head, name)) for head in heads for name in names]
    return [base for name, base in found if base != name]


def is_known(names: object, plugins: list[FoundPlugin]) -> bool:
    """Whether one of these architectures has a class here or in a plugin."""
    known = {**HERE, **plugin_models(plugins)}
    return any(name in known for name in _strings(names))


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def find_in_transformers(names: object) -> str | None:
    """The first of these architectures that is a causal language model in transformers."""
    if not _strings(names) or not has_transformers():
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    theirs = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return next((name for name in _strings(names) if name in theirs), None)


def find_model(names: object, plugins: list[FoundPlugin]) -> type[DecoderLM]:
    """The class of the first known architecture. Plugins take precedence."""
    for each in plugins:
        if each.error is not None:
            logger.warning(
                "The plugin %r of %s cannot be used: %s", each.name, each.package, each.error
            )
    added = plugin_models(plugins)
    targets = {name: known.target for name, known in HERE.items()} | added
    for name in _strings(names):
        if name in targets:
            if name in added:
                logger.info("%s is the plugin class %s", name, added[name])
            module, _, attribute = targets[name].partition(":")
            model_class: type[DecoderLM] = getattr(importlib.import_module(module), attribute)
            return model_class
    raise ModelError(_unknown(names, sorted(targets), plugins))


def _strings(names: object) -> list[str]:
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _unknown(names: object, known: list[str], found: list[FoundPlugin]) -> str:
    message = f"config.json: architectures {names!r:.200} are not supported; "
    close = [difflib.get_close_matches(name, known, 3, 0.7) for name in _strings(names)]
    nearest = dict.fromkeys(near for names_near in close for near in names_near)
    if nearest:
        message += f"the nearest are {', '.join(nearest)}; "
    message += f"supported: {', '.join(known)}"
    if find_in_transformers(names) is not None:
        message += "; transformers knows it: use --model-impl auto or transformers"
    elif has_transformers():
        message += "; transformers does not know it either"
    else:
        message += "; others may run on transformers' code: pip install 'penstock[transformers]'"
    if any(name.startswith("Jina") for name in _strings(names)):
        message += "; of Jina's models, jina-embeddings-v3 and jina-reranker-v2 are supported"
    broken = [f"{each.name!r} ({each.error})" for each in found if each.error is not None]
    return message + (f"; plugins that could not be loaded: {', '.join(broken)}" if broken else "")
