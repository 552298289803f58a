"""Files of processed media. They are removed with their last reference.

They are in shared memory while it has room, else in the folder for temporary files. A lock shows
that their owner lives. Containers may share the folders, but do not see each other's processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # nosec B108: named by this process, mode 0600
PREFIX = "penstock-media-"
LOCK = "lock-"  # after the prefix
FREE_SHARE = 4  # a quarter of the shared memory is left to others and to requests
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class MediaFile:
    """A file that this process owns. Workers read it by its path."""

    def __init__(self, places: Sequence[Path]) -> None:
        """`places`: empty files. The content goes to the first one with room for it."""
        self.places = places
        self.path = places[0]
        self._finalize = weakref.finalize(self, _remove, *places)

    def settle(self, path: str) -> None:
        """Keep the one of the places that has the content."""
        self.path = Path(path)
        _remove(*(place for place in self.places if place != self.path))

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
        self._names = itertools.count()
        self._first = f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        self._roots = _roots()
        for root in self._roots:
            _remove_left(root)
            lock = root / f"{PREFIX}{LOCK}{self._first.removeprefix(PREFIX)}"
            unseen = root / f"{self._first}-lock"  # others may only find it locked
            file = os.open(unseen, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            unseen.rename(lock)
            weakref.finalize(self, _unlock, lock, file)

    def new(self) -> MediaFile:
        name = f"{self._first}-{next(self._names)}"
        places = [root / name for root in self._roots]
        for place in places:
            os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return MediaFile(places)

    def is_short_of_room(self) -> bool:
        """Whether files go to shared memory, and that is nearly full."""
        if self._roots[0] != SHARED_MEMORY:
            return False
        found = os.statvfs(self._roots[0])
        return found.f_bavail * FREE_SHARE < found.f_blocks


def write_file(places: Sequence[str], content: bytes | memoryview) -> str | None:
    """Write to the first of the places that has room. Returns it, or None if there is none."""
    for place in places:
        try:
            Path(place).write_bytes(content)
            return place
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            os.truncate(place, 0)
    return None


def _roots() -> list[Path]:
    """The folders that files may be in, the preferred one first."""
    roots = [SHARED_MEMORY] if os.access(SHARED_MEMORY, os.W_OK) else []
    try:
        roots.append(Path(tempfile.gettempdir()))
    except FileNotFoundError:
        if not roots:
            raise
    return roots


def _remove_left(root: Path) -> None:
    """Remove the files of owners that were killed: nobody holds their locks."""
    for lock in root.glob(f"{PREFIX}{LOCK}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                owner = lock.name.removeprefix(PREFIX + LOCK)
                _remove(*root.glob(f"{PREFIX}{owner}-*"), lock)
            finally:
                os.close(file)


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _unlock(lock: Path, file: int) -> None:
    _remove(lock)
    os.close(file)
