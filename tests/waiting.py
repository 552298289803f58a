"""Waiting for what must happen, on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait until `condition` holds; fail if it does not, even on a machine under load."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {timeout_s} s"
        time.sleep(0.02)
