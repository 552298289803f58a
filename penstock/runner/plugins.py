"""Finds classes that options name as "module:Class". Their code is trusted."""

from __future__ import annotations

import importlib

from penstock.protocol.errors import ConfigError


def find_class(spec: str, what: str) -> object:
    """What `spec` names, or a ConfigError whose message begins with `what`."""
    module_name, separator, class_name = spec.partition(":")
    if not separator or not module_name or not class_name:
        raise ConfigError(f'{what} must be "module:Class", got "{spec}"')
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a plugin's module may raise anything
        raise ConfigError(f'{what} "{spec}": cannot import {module_name}: {error!r}') from error
    if not hasattr(module, class_name):
        raise ConfigError(f'{what} "{spec}": {module_name} has no {class_name}')
    found: object = getattr(module, class_name)
    return found
