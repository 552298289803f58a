"""`penstock completion`: what each shell offers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.cli.completion import SHELLS
from penstock.cli.main import BENCHMARKS, COMMANDS, main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scripts")
    with pytest.MonkeyPatch.context() as patch:
        for shell in SHELLS:
            with (folder / shell).open("w") as file:
                patch.setattr("sys.stdout", file)
                assert main(["completion", shell]) == 0
    return {shell: folder / shell for shell in SHELLS}


def offered(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    code = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _penstock; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", code, "-", script, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["se"], ["serve"]),
        (["bench", "st"], ["startup"]),
        (["serve", "--dty"], ["--dtype"]),
        (["serve", "--dtype", "bfl"], ["bfloat16"]),
        (["bench", "serve", "--dataset-n"], ["--dataset-name"]),
        (["completion", "z"], ["zsh"]),
        (["--ver"], ["--version"]),
    ],
)
def test_bash_offers_commands_flags_and_values(
    scripts: dict[str, Path], words: list[str], found: list[str]
) -> None:
    assert offered(scripts["bash"], "penstock", *words) == found


def test_bash_offers_files_where_nothing_else_fits(
    scripts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert offered(scripts["bash"], "penstock", "serve", "mod") == ["model.gguf"]
    assert offered(scripts["bash"], "penstock", "serve", "--model", "mod") == ["model.gguf"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_is_in_every_script(scripts: dict[str, Path], shell: str) -> None:
    text = scripts[shell].read_text()
    assert all(name in text for name in (*COMMANDS, *BENCHMARKS))
    if shutil.which(shell):
        subprocess.run([shell, "-n", scripts[shell]], check=True)
