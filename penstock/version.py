"""vLLM's place for the version."""

from penstock.protocol.version import VERSION as __version__

__all__ = ["__version__"]
