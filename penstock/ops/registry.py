"""Decides which implementation of an op a device uses, when a layer is constructed.

A backend is a module that defines functions named like the ops it implements.
`penstock.ops.reference` defines every op and ends every list.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("penstock.ops.sampling_cpu", "penstock.ops.reference"),
    "cpu-native": ("penstock.ops.cpu.ops", "penstock.ops.reference"),  # if its library loads
    "cuda": ("penstock.ops.triton.ops", "penstock.ops.reference"),
}


class Ops:
    """The ops of one device: ``ops.rms_norm(x, weight, eps)``."""

    def __init__(self, backend: str, added: Sequence[str] = ()) -> None:
        """`added` modules, from plugins, come before those of the backend."""
        names = (*added, *BACKENDS[backend])
        self._modules = [importlib.import_module(name) for name in names]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        module = self._module_of(name)
        function: Callable[..., Any] = getattr(module, name)
        setattr(self, name, function)  # later look-ups are plain attribute reads
        return function

    def find(self, name: str) -> Callable[..., Any] | None:
        """A fused op that only some backends have, or None. Without it, a layer uses single ops."""
        return next((getattr(m, name) for m in self._modules if hasattr(m, name)), None)

    def _module_of(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                return module
        raise AttributeError(f"no backend implements the op {name!r}")
