"""Which class runs which architecture. Nothing is imported before it is asked for."""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.models.architectures import ARCHITECTURES
from penstock.models.config import DecoderConfig
from penstock.models.plugins import FoundPlugin, find_plugins, plugin_models
from penstock.protocol.errors import ModelError

if TYPE_CHECKING:
    from penstock.layers.build import Build
    from penstock.models.decoder import DecoderLM

logger = logging.getLogger(__name__)


def build_model(raw: Mapping[str, Any], build: Build) -> DecoderLM:
    """The model that a config.json describes, its weights still to be loaded."""
    model_class = find_model(raw.get("architectures"))
    given = {key: value for key, value in raw.items() if value is not None}
    config = DecoderConfig.from_raw(model_class.settings(given))
    return model_class(build, config).eval()


def find_model(names: object) -> type[DecoderLM]:
    """The class of the first of these architectures that is known; a plugin's before an own one."""
    found = find_plugins()
    for each in found:
        if each.error is not None:
            logger.warning(
                "The plugin %r of %s cannot be used: %s", each.name, each.package, each.error
            )
    added = plugin_models(found)
    targets = {name: known.target for name, known in ARCHITECTURES.items()} | added
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in targets:
            if name in added:
                logger.info("%s is the plugin class %s", name, added[name])
            module, _, attribute = targets[name].partition(":")
            model_class: type[DecoderLM] = getattr(importlib.import_module(module), attribute)
            return model_class
    raise ModelError(_unknown(names, sorted(targets), found))


def _unknown(names: object, known: list[str], found: list[FoundPlugin]) -> str:
    message = f"config.json: architectures {names!r:.200} are not supported; "
    asked = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    nearest = [near for name in asked for near in difflib.get_close_matches(name, known, 3, 0.7)]
    if nearest:
        message += f"the nearest are {', '.join(dict.fromkeys(nearest))}; "
    message += f"supported are {', '.join(known)}"
    broken = [f"{each.name!r} ({each.error})" for each in found if each.error is not None]
    return message + (f"; plugins that could not be loaded: {', '.join(broken)}" if broken else "")
