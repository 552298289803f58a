"""Files of shared memory that hold processed media. They are removed with their last reference."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import weakref
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # nosec B108: named by this process, mode 0600
PREFIX = "penstock-media-"


class MediaFile:
    """A file that this process owns. Workers read it by its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._finalize = weakref.finalize(self, _remove, path)

    @property
    def size(self) -> int:
        """Bytes; 0 before it is written."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


class MediaFolder:
    """Names files. Those of processes that were killed are removed."""

    def __init__(self) -> None:
        root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self._names = itertools.count()
        self._first = f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        self._root = root
        for path in root.glob(f"{PREFIX}*"):
            pid = path.name.removeprefix(PREFIX).partition("-")[0]
            if pid.isdigit() and not _is_alive(int(pid)):
                _remove(path)

    def new(self) -> MediaFile:
        path = self._root / f"{self._first}-{next(self._names)}"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return MediaFile(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
