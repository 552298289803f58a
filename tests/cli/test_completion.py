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


COMPLETIONS = {  # what is typed, and the only word that it can become
    "penstock se": "serve",
    "penstock bench st": "startup",
    "penstock serve --dty": "--dtype",
    "penstock serve --dtype bfl": "bfloat16",
    "penstock bench serve --dataset-n": "--dataset-name",
    "penstock completion z": "zsh",
    "penstock --ver": "--version",
}
ZSHRC = """\
autoload -Uz compinit && compinit -D -u
source "$SCRIPT"
show() { print -r -- "<<$BUFFER>>"; BUFFER="" }
zle -N show
bindkey '^X' show
PROMPT='ready> '
"""
ZSH_DRIVER = """\
zmodload zsh/zpty
zpty shell zsh -o NO_GLOBAL_RCS -i
zpty -r shell line '*ready> *'
for typed; do
  zpty -n -w shell "$typed"$'\\t\\x18'
  zpty -r shell line '*<<*>>*'
  print -r -- "${${line##*<<}%%>>*}"
done
zpty -d shell
"""


@pytest.mark.parametrize("typed", COMPLETIONS)
def test_bash_offers_commands_flags_and_values(scripts: dict[str, Path], typed: str) -> None:
    assert offered(scripts["bash"], *typed.split()) == [COMPLETIONS[typed]]


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_completes_commands_flags_and_values(
    scripts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".zshrc").write_text(ZSHRC)
    monkeypatch.setenv("ZDOTDIR", str(tmp_path))
    monkeypatch.setenv("SCRIPT", str(scripts["zsh"]))
    done = subprocess.run(
        ["zsh", "-f", "-c", ZSH_DRIVER, "-", *COMPLETIONS],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    lines = [" ".join([*typed.split()[:-1], word]) for typed, word in COMPLETIONS.items()]
    assert [line.rstrip() for line in done.stdout.splitlines()] == lines


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_offers_commands_flags_and_values(scripts: dict[str, Path]) -> None:
    code = "source $argv[1]; for typed in $argv[2..]; complete -C $typed; end"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code, scripts["fish"], *COMPLETIONS],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert found == list(COMPLETIONS.values())


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
