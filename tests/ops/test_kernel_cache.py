"""Triton's cache on disks that lose, change or take nothing: kernels are compiled all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

KERNEL = Path(__file__).parents[1] / "faults" / "kernel.py"


class Compiler:
    """A process that compiles a kernel again and again, with its cache in a folder."""

    def __init__(self, cache: Path, *arguments: str) -> None:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, str(KERNEL), *arguments],
            env={**env, "TRITON_CACHE_DIR": str(cache)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def compile(self) -> str:
        """The digest of the machine code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("again\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> str:
        """What it logged."""
        _, log = self._process.communicate()
        assert self._process.returncode == 0, log
        return log


def files_of(cache: Path) -> dict[Path, int]:
    """Every file, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def test_a_damaged_cache_is_compiled_again(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    digest = compiler.compile()
    before = files_of(tmp_path)
    assert any(path.suffix == ".cubin" for path in before), compiler.close()
    assert compiler.compile() == digest
    assert files_of(tmp_path) == before, "what is whole is used as it is"
    damages: list[tuple[Callable[[Path], None], str]] = [
        (change_a_byte, ".cubin"),  # machine code that nobody compiled
        (cut_short, ".json"),  # over which Triton would raise, as over the next
        (Path.unlink, ".ptx"),
        (change_a_byte, ".sha256"),
        (cut_short, ""),  # all of them, as after a crash of the machine
    ]
    for damage, suffix in damages:
        for path in files_of(tmp_path):
            if path.name.endswith(suffix):
                damage(path)
        damaged = files_of(tmp_path)
        assert compiler.compile() == digest, (damage, suffix, compiler.close())
        assert files_of(tmp_path) != damaged
    assert "Traceback" not in compiler.close()


@pytest.mark.parametrize("where", ["full", "not a folder"])
def test_a_cache_that_takes_nothing_costs_a_warning(tmp_path: Path, where: str) -> None:
    cache = tmp_path / "cache"
    if where == "not a folder":
        cache.write_text("a file")
    compiler = Compiler(cache, *([str(cache)] if where == "full" else []))
    digests = {compiler.compile() for _ in range(2)}
    log = compiler.close()
    assert [len(digest.strip()) for digest in digests] == [64], log
    assert log.count(f"cannot be kept in {cache}") == 1
    folder = Path(log.partition("they are in ")[2].partition(" until")[0])
    assert folder.name.startswith("penstock-kernels-")
    assert not folder.exists(), "it went with its process"
