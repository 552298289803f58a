"""Models and ops of other packages, which name them under the entry point `penstock.plugins`.

An entry point leads to a `Plugin`. Nothing of it is registered anywhere: whoever needs plugins
asks `find_plugins` and gets the same answer in every process.
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

    `models` says where the class of an architecture is, as "module:class"; it goes before an own
    class of that name. `ops` has, by backend (`BACKENDS` in penstock/ops/registry.py), a module
    whose ops go before the backend's.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FoundPlugin:
    """An entry point: its plugin, or why it has none."""

    name: str
    package: str  # with its version
    plugin: Plugin | None
    error: str | None = None


def find_plugins() -> list[FoundPlugin]:
    """Every installed plugin, by name; a broken one is told, not raised."""
    entries = importlib.metadata.entry_points(group=GROUP)
    return [_load(entry) for entry in sorted(entries, key=lambda entry: entry.name)]


def plugin_models(found: list[FoundPlugin]) -> dict[str, str]:
    """The models of all plugins. ModelError where two have the same architecture."""
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
    """The plugins' modules of ops for a backend."""
    plugins = [each.plugin for each in found if each.plugin is not None]
    return tuple(plugin.ops[backend] for plugin in plugins if backend in plugin.ops)


def _load(entry: importlib.metadata.EntryPoint) -> FoundPlugin:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown"
    try:
        plugin = entry.load()
    except Exception as error:  # another's code may raise anything
        return FoundPlugin(entry.name, package, None, f"{type(error).__name__}: {error}")
    if not isinstance(plugin, Plugin):
        message = f"{entry.value} is no penstock.models.plugins.Plugin but {plugin!r:.80}"
        return FoundPlugin(entry.name, package, None, message)
    return FoundPlugin(entry.name, package, plugin)
