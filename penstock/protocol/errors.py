"""Every error that a user can cause, typed, with the field and the remedy in its text."""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""


class ConfigError(PenstockError):
    """An engine option, or a combination of options, that cannot work."""


class InputError(PenstockError, ValueError):
    """A request that cannot be run; `field` names what was wrong with it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelError(PenstockError):
    """A model that cannot be found, read or understood."""


class RequestFault(PenstockError):
    """A request that failed while it ran. The engine and its other requests go on."""


class CrashFault(RequestFault):
    """A request that killed the engine, again and again, with nothing else running."""


class OutOfMemory(PenstockError, MemoryError):
    """A step did not fit into the device's memory; a smaller one may."""


class EngineDeadError(PenstockError):
    """The engine is gone; nothing more can be run on it."""


def waited_too_long(limit_s: float) -> str:
    """What a request is told that was never begun."""
    return f"the request waited longer than {limit_s:g} s for its turn; try again later"
