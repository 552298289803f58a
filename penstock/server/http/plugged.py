"""Middleware that an operator adds with --middleware."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from fastapi import FastAPI

from penstock.protocol.errors import ConfigError


def add_middleware(app: FastAPI, spec: str) -> None:
    """Add an ASGI middleware class, or a function `async (request, call_next) -> response`.

    `spec` is module:name or module.name. Raises `ConfigError` if it names neither.
    """
    module, colon, name = spec.partition(":")
    if not colon:
        module, _, name = spec.rpartition(".")
    found: Any
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"middleware must be module:name of something that can be imported, got {spec!r}: "
            f"{error}"
        ) from error
    is_class: bool = inspect.isclass(found)
    if is_class:
        app.add_middleware(found)
    elif inspect.iscoroutinefunction(found):
        app.middleware("http")(found)
    else:
        raise ConfigError(f"middleware must name a class or an async function, got {spec!r}")
