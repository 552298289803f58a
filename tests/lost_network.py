"""A network that loses everything: what arrives at a socket is dropped, as if it never came."""

from __future__ import annotations

import ctypes
import socket
import struct

SO_ATTACH_FILTER = 26  # of Linux
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0 bytes of each packet


def lose_all(end: socket.socket) -> None:
    """The kernel neither delivers nor acknowledges what comes to this socket from now on."""
    code = ctypes.create_string_buffer(DROP_ALL)
    program = struct.pack("HL", 1, ctypes.addressof(code))
    end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
