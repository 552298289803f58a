"""Silence: decides that the machine at the other end of a socket is gone.

A process that computes, or is stopped, sends nothing for as long as it takes, but its kernel still
acknowledges what arrives. So the kernel here is asked whether what was sent was acknowledged.
"""

from __future__ import annotations

import socket
import struct
import time

CHECK_S = 0.1  # between two checks by the engine, while ranks compute
RANK_CHECK_S = 0.25  # between two by a rank
SILENCE_S = 0.7  # without an acknowledgement, after which a machine counts as gone
PAUSE_S = 0.5  # without a check, after which the silence counts from anew
_INFO = struct.Struct("8B13I")  # the beginning of Linux's tcp_info
_UNACKED, _LAST_ACK = 12, 20  # in it: segments that are not acknowledged; ms since any was


class Silence:
    """Of one TCP connection. Only what was sent tells, so the engine sends before each check."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._heard_at = self._checked_at = time.monotonic()

    def is_too_long(self) -> bool:
        now = time.monotonic()
        has_paused = now - self._checked_at > PAUSE_S
        self._checked_at = now
        heard_s = self._acknowledged_s()
        if heard_s is None or has_paused:
            self._heard_at = now
        else:
            self._heard_at = max(self._heard_at, now - heard_s)
        return now - self._heard_at > SILENCE_S

    def _acknowledged_s(self) -> float | None:
        """Seconds since the last acknowledgement. None: nothing waits for one, or nobody knows."""
        if not hasattr(socket, "TCP_INFO"):  # then TCP's own probes end the connection
            return None
        try:
            info = _INFO.unpack(
                self._end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            )
        except OSError:
            return None  # sending or receiving fails, too
        return info[_LAST_ACK] / 1000 if info[_UNACKED] else None
