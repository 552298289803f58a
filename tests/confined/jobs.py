"""Jobs for confined processes: the payload names what to do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path


def make(setup: bytes) -> Callable[[bytes], bytes]:
    if setup == b"broken":
        raise ValueError("there is no such setup")
    if setup == b"abort":
        os.abort()

    def run(payload: bytes) -> bytes:
        what, _, argument = payload.decode().partition(" ")
        match what:
            case "echo":
                return setup + argument.encode()
            case "pid":
                return str(os.getpid()).encode()
            case "spin":
                while not argument or not Path(argument).exists():
                    pass
            case "count":
                for _ in range(int(argument)):
                    pass
            case "allocate":
                bytearray(2**40)
            case "abort":
                os.abort()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "die" if not Path(argument).exists():
                Path(argument).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "die":
                pass
            case _:
                raise KeyError(what)
        return b"done"

    return run
