"""Triton's cache of compiled kernels on disk, with checksums.

Triton trusts the files in its cache. A truncated or changed file would make every step fail, in
every engine, until someone removes it. Here a damaged file is compiled again, and a cache that
cannot be written does no harm.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import shutil
import tempfile
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

logger = logging.getLogger(__name__)

DIGEST_SUFFIX = ".sha256"
# Folders created in it are private to this user.
MEMORY_FOLDER = "/dev/shm"  # nosec B108


def use_checked_cache() -> None:
    """Make Triton use this cache from now on, unless the user chose another."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = CheckedCache


class CheckedCache(FileCacheManager):
    """Stores a digest beside every file, and returns only files that match theirs.

    If the folder is not writable (disk full, no permission), kernels go to a folder that lasts as
    long as the process.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._is_users = override or dump  # folders that Triton developers edit by hand
        try:
            super().__init__(key, override, dump)
        except OSError as error:
            if self._is_users:
                raise
            self._go_elsewhere(error)

    def get_file(self, filename: str) -> str | None:
        path = super().get_file(filename)
        return path if path is not None and (self._is_users or _is_whole(Path(path))) else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        if self.get_file(f"__grp__{filename}") is None:
            return None
        group: dict[str, str] | None = super().get_group(filename)
        if group is None or self._is_users:
            return group
        return group if all(_is_whole(Path(path)) for path in group.values()) else None

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        if self._is_users:
            return str(super().put(data, filename, binary))
        content = data if isinstance(data, bytes) else str(data).encode()
        try:
            return self._put(content, filename)
        except OSError as error:
            self._go_elsewhere(error)
            return self._put(content, filename)

    def _put(self, content: bytes, filename: str) -> str:
        super().put(_digest(content), filename + DIGEST_SUFFIX)
        return str(super().put(content, filename))

    def _go_elsewhere(self, error: OSError) -> None:
        unusable, knobs.cache.dir = knobs.cache.dir, scratch_folder()
        logger.warning(
            "Compiled kernels cannot be kept in %s (%s): they are in %s until this process ends, "
            "and the next one compiles its own",
            *(unusable, error.strerror, knobs.cache.dir),
        )
        super().__init__(self.key)


@functools.cache
def scratch_folder() -> str:
    """A folder in memory if possible: another folder on disk may be full as well."""
    parent = MEMORY_FOLDER if Path(MEMORY_FOLDER).is_dir() else None
    folder = tempfile.mkdtemp(prefix="penstock-kernels-", dir=parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_whole(path: Path) -> bool:
    try:
        return Path(f"{path}{DIGEST_SUFFIX}").read_bytes() == _digest(path.read_bytes())
    except OSError:
        return False


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
