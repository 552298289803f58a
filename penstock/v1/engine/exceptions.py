"""vLLM's place for the error of an engine that is gone."""

from penstock.protocol.errors import EngineDeadError

__all__ = ["EngineDeadError"]
