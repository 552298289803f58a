"""Opens the listening socket and sets the kernel's options for its connections."""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.config import ServerConfig
from penstock.protocol.errors import ConfigError

MAX_UNSENT_BYTES = 16 * 1024  # per connection, in the kernel, not sent yet
MAX_SEND_BUFFER_BYTES = 256 * 1024  # where the kernel can only limit the whole send buffer
PROBE_AFTER_S, PROBE_EVERY_S, NUM_PROBES = 30, 10, 3  # TCP keep-alive


@contextlib.contextmanager
def listening_socket(config: ServerConfig) -> Iterator[socket.socket]:
    """Bind a socket, before the model is loaded. Raises ConfigError if that fails."""
    if config.uds is not None:
        listener = _unix_socket(Path(config.uds))
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_vanished_clients(listener, config.slow_reader_timeout_s)
        _bound_unsent(listener)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port} ({error.strerror}): choose "
                "another --host or --port"
            ) from error
    try:
        yield listener
    finally:
        listener.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def _notice_vanished_clients(listener: socket.socket, slow_reader_timeout_s: float) -> None:
    """Make the kernel close connections to machines that vanished.

    Otherwise their requests would be computed to the end for nobody. Connections inherit this.
    """
    patience_s = PROBE_AFTER_S + NUM_PROBES * PROBE_EVERY_S
    unread_s = max(slow_reader_timeout_s, patience_s)  # a client that does not read may be alive
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_AFTER_S),
        ("TCP_KEEPINTVL", PROBE_EVERY_S),
        ("TCP_KEEPCNT", NUM_PROBES),
        ("TCP_USER_TIMEOUT", int(1000 * unread_s)),
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bound_unsent(listener: socket.socket) -> None:
    """Limit how much of an answer the kernel buffers. Connections inherit this.

    Otherwise it buffers megabytes for a client that never reads, and the server would not notice.
    Bytes in flight do not count, so a long round trip is not slower.
    """
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_SEND_BUFFER_BYTES)


def _unix_socket(path: Path) -> socket.socket:
    """Bind a Unix socket. Replaces a socket that a killed server left behind."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise ConfigError(f"uds must name a socket or nothing yet, but {path} is a file")
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionError):
                probe.connect(str(path))
                raise ConfigError(f"another server listens on {path}: choose another --uds")
            path.unlink()
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path} ({error.strerror})") from error
    except ConfigError:
        listener.close()
        raise
    return listener
