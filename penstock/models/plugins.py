"""Finds models and ops of other packages through the entry point `penstock.plugins`.

An entry point refers to a `Plugin`. There is no registry: callers use `find_plugins`, which gives
the same answer in every process.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.protocol.errors import ModelError

GROUP = "penstock.plugins"


@dataclass(frozen=True)
class Plugin:
    """What a package adds.

    `models` maps an architecture to its class, as "module:class", which takes precedence over a
    built-in class. `ops` maps a backend (`BACKENDS` in penstock/ops/registry.py) to a module whose
    ops take precedence over the backend's.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FoundPlugin:
    """An entry point: its plugin, or why it did not load."""

    name: str
    package: str  # name and version
    plugin: Plugin | None
    error: str | None = None


def find_plugins() -> list[FoundPlugin]:
    """Every installed plugin, by name. A broken one is reported, not raised."""
    entries = importlib.metadata.entry_points(group=GROUP)
    return [_load(entry) for entry in sorted(entries, key=lambda entry: entry.name)]


def plugin_models(found: list[FoundPlugin]) -> dict[str, str]:
    """The models of all plugins. Raises ModelError if two have the same architecture."""
    models: dict[str, str] = {}
    owners: dict[str, str] = {}
    for each in found:
        for name, target in (each.plugin.models if each.plugin else {}).items():
            if name in models:
                raise ModelError(
                    f"the plugins {owners[name]!r} and {each.name!r} both have {name}: "
                    "uninstall one of them"
                )
            models[name], owners[name] = target, each.name
    return models


def plugin_ops(found: list[FoundPlugin], backend: str) -> tuple[str, ...]:
    """The plugins' op modules for a backend."""
    plugins = [each.plugin for each in found if each.plugin is not None]
    return tuple(plugin.ops[backend] for plugin in plugins if backend in plugin.ops)


def _load(entry: importlib.metadata.EntryPoint) -> FoundPlugin:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown"
    try:
        plugin = entry.load()
    except Exception as error:  # plugin code may raise anything
        return FoundPlugin(entry.name, package, None, f"{type(error).__name__}: {error}")
    if not isinstance(plugin, Plugin):
        message = f"{entry.value} is no penstock.models.plugins.Plugin but {plugin!r:.80}"
        return FoundPlugin(entry.name, package, None, message)
    return FoundPlugin(entry.name, package, plugin)
