"""vLLM's place for ports."""

import socket

__all__ = ["get_open_port"]


def get_open_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])
