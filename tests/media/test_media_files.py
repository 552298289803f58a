"""Files of processed media: who owns them, and who removes them."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.media import files
from penstock.media.files import MediaFolder

OWNER = """
import sys
from pathlib import Path
from penstock.media import files

files._roots = lambda: [Path(each) for each in sys.argv[1:]]
folder = files.MediaFolder()
file = folder.new()
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found = [tmp_path / "memory", tmp_path / "temporary"]
    for root in found:
        root.mkdir()
    monkeypatch.setattr(files, "_roots", lambda: found)
    return found


def in_folders(roots: list[Path]) -> list[Path]:
    return [path for root in roots for path in root.iterdir()]


def test_files_end_with_their_last_reference_and_locks_with_the_folder(roots: list[Path]) -> None:
    folder = MediaFolder()
    first, second = folder.new(), folder.new()
    assert len(in_folders(roots)) == 6, "of each root, a lock and the places of two files"
    second.settle(str(second.places[1]))
    assert not second.places[0].exists()
    assert second.path.exists()
    del first, second
    assert len(in_folders(roots)) == 2
    del folder
    assert not in_folders(roots)


def test_a_process_that_starts_at_the_same_time_leaves_a_new_lock_alone(
    roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def start_another_first(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        MediaFolder()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", start_another_first)
    folder = MediaFolder()
    locks = in_folders(roots)
    assert len(locks) == len(roots)
    assert all(path.name.startswith(files.PREFIX + files.LOCK) for path in locks)
    del folder
    assert not in_folders(roots)


def test_only_the_files_of_owners_that_are_dead_are_removed(roots: list[Path]) -> None:
    """Their process ids say nothing: those of other containers are not seen."""
    mine = MediaFolder()
    kept = mine.new()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, *map(str, roots)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        theirs = set(in_folders(roots))
        MediaFolder()
        assert set(in_folders(roots)) == theirs, "all of them live"
        owner.kill()
        owner.wait()
        MediaFolder()
    left = set(in_folders(roots))
    assert left < theirs
    assert len(left) == 4
    assert all(place in left for place in kept.places)
