"""How processes of this package start and end."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Disable the garbage collector during imports, and freeze what they created.

    Objects of modules are not freed before exit. Walking them repeatedly takes a tenth of the time
    of importing torch, and walking them once afterwards as much again. In a program that has torch
    already, nothing is frozen: it may have models in reference cycles, which must stay collectable.
    """
    was_enabled, had_torch = gc.isenabled(), "torch" in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if was_enabled and not had_torch:
            gc.freeze()
            atexit.register(gc.unfreeze)


def exit_at_once() -> None:
    """At exit, do not let the garbage collector walk all objects: the memory goes anyway.

    With torch that takes longer than to load a small model. For processes whose code is all ours:
    files in reference cycles would not be closed. Called first, it acts last.
    """
    atexit.register(_freeze)


def _freeze() -> None:
    if "triton" not in sys.modules:  # its bindings report what is not freed
        gc.freeze()


def module_command(module: str, *arguments: str) -> list[str]:
    """Runs `main` of a module. It finds whatever this process does, and what it is told to by its
    environment.

    With ``python -m`` the working directory would come first: whoever may put a file there could
    run code here.
    """
    code = (
        f"import sys; ours, own = {sys.path!r}, sys.path[sys.path[:1] == [''] :]\n"
        "sys.path[:] = dict.fromkeys([*ours[:1], *own, *ours])\n"
        f"from {__name__} import collector_at_rest, exit_at_once\n"
        "exit_at_once()\n"
        f"with collector_at_rest(): from {module} import main\n"
        "sys.exit(main())"
    )
    return [sys.executable, "-c", code, *arguments]
