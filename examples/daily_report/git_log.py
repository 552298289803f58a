"""Reads a day's commits from a git repository, whatever they contain.

The repository is not trusted: no program that its configuration names is run, nothing is fetched,
output is read up to a limit, and bytes that are not UTF-8 become replacement characters.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from pathlib import Path

MAX_OUTPUT_BYTES = 4 << 20  # of one git command; the rest of a larger diff is not read
TIMEOUT_S = 60
MAX_LINE_CHARS = 300  # of a diff; lines of minified files are longer
MAX_FILES_LISTED = 40
SETTINGS = (
    "core.bigFileThreshold=1m",  # larger files count as binary: their diff is not computed
    "core.quotePath=false",
    "i18n.logOutputEncoding=UTF-8",
    "log.showRoot=true",
    "log.showSignature=false",  # would run gpg.program
)
ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_ALLOW_PROTOCOL": "none",  # objects that a partial clone lacks are not fetched
    "LC_ALL": "C.UTF-8",
}
FIELDS = ("hash", "parents", "author", "message")
FORMAT = "--format=%H%x00%P%x00%an%x00%B%x00"


class GitError(Exception):
    """git cannot be run, or refuses."""


@dataclass(frozen=True)
class ChangedFile:
    path: str
    added: int | None  # None: a binary file
    removed: int | None


@dataclass(frozen=True)
class Commit:
    hash: str
    parents: tuple[str, ...]
    author: str
    message: str
    files: tuple[ChangedFile, ...]
    patch: str  # of a merge: only what differs from all parents

    @property
    def subject(self) -> str:
        return self.message.strip().partition("\n")[0].strip() or "(no message)"

    @property
    def is_plain_merge(self) -> bool:
        return len(self.parents) > 1 and not self.patch

    @property
    def num_lines(self) -> int:
        return sum((file.added or 0) + (file.removed or 0) for file in self.files)

    @property
    def size(self) -> str:
        added = sum(file.added or 0 for file in self.files)
        removed = sum(file.removed or 0 for file in self.files)
        return f"+{added} −{removed}, {len(self.files)} file{'s' * (len(self.files) != 1)}"


def commits_of_day(repository: Path, day: date, revision: str = "HEAD") -> list[Commit]:
    """The commits that were committed on a day of the local time zone, oldest first."""
    start = datetime.combine(day, time.min).astimezone()
    end = datetime.combine(day + timedelta(days=1), time.min).astimezone()
    bounds = [
        f"--since={int(start.timestamp())} +0000",
        f"--until={int(end.timestamp()) - 1} +0000",
    ]
    listed = run_git(
        repository, "log", "--reverse", "--format=%H", *bounds, "--end-of-options", revision, "--"
    )
    return [read_commit(repository, name) for name in listed.split()]


def read_commit(repository: Path, name: str) -> Commit:
    shape = [FORMAT, "--cc", "--numstat", "--patch", "--find-renames"]
    safe = ["--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules"]
    output = run_git(repository, "show", *shape, *safe, name, "--")
    *fields, changes = output.split("\0", len(FIELDS))
    values = dict(zip(FIELDS, fields, strict=True))
    stats, found, patch = changes.partition("\ndiff --")
    parents = tuple(values["parents"].split())
    return Commit(
        hash=values["hash"],
        parents=parents,
        author=values["author"],
        message=values["message"],
        # Those of a merge are against its first parent: the whole branch, which is listed anyway.
        files=() if len(parents) > 1 else tuple(read_stats(stats)),
        patch=f"diff --{patch}" if found else "",
    )


def read_stats(text: str) -> list[ChangedFile]:
    rows = re.findall(r"^(\d+|-)\t(\d+|-)\t(.+)$", text, re.MULTILINE)

    def number(value: str) -> int | None:
        return None if value == "-" else int(value)

    return [ChangedFile(path, number(added), number(removed)) for added, removed, path in rows]


def run_git(repository: Path, *arguments: str) -> str:
    """What a git command prints, up to a limit. Raises `GitError` if it fails or hangs."""
    settings = [part for setting in SETTINGS for part in ("-c", setting)]
    command = ["git", "--no-pager", "-C", str(repository), *settings, *arguments]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
        )
    except FileNotFoundError as error:
        raise GitError("git was not found: install it, or add it to PATH") from error
    timer = threading.Timer(TIMEOUT_S, process.kill)
    timer.start()
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = process.stdout.read(MAX_OUTPUT_BYTES)
        cut = len(output) == MAX_OUTPUT_BYTES
        if cut:
            process.kill()
        problem = process.stderr.read(2000).decode(errors="replace").strip()
        status = process.wait()
    expired = not timer.is_alive()
    timer.cancel()
    if expired and not cut:
        raise GitError(f"git {arguments[0]} took longer than {TIMEOUT_S} s in {repository}")
    if status != 0 and not cut:
        raise GitError(f"git {arguments[0]} failed in {repository}: {problem or status}")
    return output.decode(errors="replace")


def excerpt(commit: Commit, max_chars: int) -> str:
    """A commit's files and its diff. Large diffs are cut, so that every file keeps a share."""
    listed = [
        f"{file.path} " + ("binary" if file.added is None else f"+{file.added} -{file.removed}")
        for file in commit.files[:MAX_FILES_LISTED]
    ]
    if len(commit.files) > MAX_FILES_LISTED:
        listed.append(f"and {len(commit.files) - MAX_FILES_LISTED} more files")
    parts = re.split(r"^(?=diff --)", commit.patch, flags=re.MULTILINE)
    parts = [shorten_lines(part) for part in parts if part]
    return "\n".join([*listed, *share_out(parts, max_chars)])


def shorten_lines(text: str) -> str:
    lines = text.split("\n")
    return "\n".join(
        line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]}…" for line in lines
    )


def share_out(parts: list[str], max_chars: int) -> list[str]:
    """Cut parts to a total length: short ones stay whole, long ones get equal shares."""
    kept = dict.fromkeys(range(len(parts)), "")
    left = max_chars
    for done, index in enumerate(sorted(kept, key=lambda each: len(parts[each]))):
        share = left // (len(parts) - done)
        kept[index] = parts[index][:share]
        left -= len(kept[index])
    return [text for text in kept.values() if text]
