"""Makes named functions of a server and its engine raise or stall when a test says so.

Python imports a module of this name when it starts, from PYTHONPATH if there is one (`points.py`
sees to that). Nothing of the product knows of it: functions are wrapped as their modules are
imported, in whichever process that is.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ["FAULT_FOLDER"])
POINTS: dict[str, list[str]] = {}  # by module: functions in it
for _point in os.environ["FAULT_POINTS"].split():
    POINTS.setdefault(_point.partition(":")[0], []).append(_point.partition(":")[2])


class InjectedFault(RuntimeError):
    pass


class Wrapper(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in POINTS else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_wrap(module: ModuleType) -> None:
                execute(module)
                for function in POINTS[name]:
                    wrap(module, name, function)

            spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def wrap(module: ModuleType, module_name: str, path: str) -> None:
    owner: Any = module
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    inner: Callable[..., Any] = getattr(owner, name)
    fault = Fault(FOLDER / f"{module_name}:{path}")

    @functools.wraps(inner)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        # As a page of a mapped file does that a slow disk takes its time for: Python stands still.
        ctypes.PyDLL(None).usleep(int(fault.strike() * 1e6))
        return inner(*arguments, **options)

    @functools.wraps(inner)
    async def async_wrapper(*arguments: Any, **options: Any) -> Any:
        stall_s = fault.strike()
        while stall_s == math.inf and fault.taken.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(stall_s if stall_s < math.inf else 0)
        return await inner(*arguments, **options)

    setattr(owner, name, async_wrapper if inspect.iscoroutinefunction(inner) else wrapper)


class Fault:
    """What a file asks of one function; whoever takes the file away strikes."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag
        self.taken = flag.with_name(f"{flag.name}.taken")
        self._num_calls = 0  # since the file came

    def strike(self) -> float:
        """Raise, or say for how many seconds to stall, if it is time for that."""
        try:
            kind, number = self._flag.read_text().split()
            self._num_calls += 1
            if kind == "raise" and self._num_calls <= int(number):
                return 0.0
            self._flag.rename(self.taken)
        except FileNotFoundError:  # nothing is asked for, or another process was faster
            self._num_calls = 0
            return 0.0
        self._num_calls = 0
        if kind == "raise":
            raise InjectedFault(self._flag.name)
        return float(number)


sys.meta_path.insert(0, Wrapper())
