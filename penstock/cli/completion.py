"""`penstock completion`: prints a shell's completion of commands and flags."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import NamedTuple

SHELLS = ("bash", "zsh", "fish")


class Flag(NamedTuple):
    names: tuple[str, ...]
    help: str
    choices: tuple[str, ...]
    takes_value: bool


class Completed(NamedTuple):
    """A command: its words after `penstock`, what may follow, and its flags."""

    words: tuple[str, ...]
    subcommands: dict[str, str]  # with their help
    values: list[str]  # of its first argument
    flags: list[Flag]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish.")


def run(args: argparse.Namespace) -> int:
    from penstock.cli.main import build_parser

    commands = list(walk(build_parser()))
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](commands), end="")
    return 0


def walk(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[Completed]:
    """The command of a parser, and then those below it."""
    load = getattr(parser, "load", None)
    if load is not None:
        load()
    subcommands: dict[str, str] = {}
    values: list[str] = []
    flags: list[Flag] = []
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subcommands = {each.dest: str(each.help) for each in action._choices_actions}
            below = action.choices
        elif not action.option_strings:
            values += map(str, action.choices or ())
        elif action.option_strings and action.help != argparse.SUPPRESS:
            choices = tuple(map(str, action.choices or ()))
            help_text = str(action.help or "").replace("%%", "%")
            takes_value = action.nargs != 0
            flags.append(Flag(tuple(action.option_strings), help_text, choices, takes_value))
    yield Completed(words, subcommands, values, flags)
    for name, child in below.items():
        yield from walk(child, (*words, name))


def bash(commands: list[Completed]) -> str:
    """A script for bash. Values of flags without choices are completed as files."""
    cases = []
    for command in commands:
        flags = [name for flag in command.flags for name in flag.names]
        words = [*command.subcommands, *command.values, *flags]
        path = " ".join(command.words)
        for flag in command.flags:
            pattern = "|".join(f'"{path}:{name}"' for name in flag.names)
            if flag.takes_value:
                values = shlex.quote(" ".join(flag.choices))
                cases.append(f"    {pattern}) words={values} ;;")
        cases.append(f'    "{path}:"*) words={shlex.quote(" ".join(words))} ;;')
    groups = " ".join(sorted({" ".join(c.words) for c in commands if c.words and c.subcommands}))
    commands_shown = " ".join(commands[0].subcommands)
    return f"""\
# Completion of penstock for bash: source it, or save it where bash-completion looks.
_penstock() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local command="" words=""
  if [[ $COMP_CWORD -gt 1 && " {commands_shown} " == *" ${{COMP_WORDS[1]}} "* ]]; then
    command="${{COMP_WORDS[1]}}"
    if [[ $COMP_CWORD -gt 2 && " {groups} " == *" $command "* ]]; then
      command="$command ${{COMP_WORDS[2]}}"
    fi
  fi
  case "$command:$previous" in
{chr(10).join(cases)}
  esac
  if [[ -z $words || ( $current != -* && $command != "" && $words == -* ) ]]; then
    COMPREPLY=($(compgen -f -- "$current"))
  else
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  fi
}}
complete -o filenames -F _penstock penstock
"""


def zsh(commands: list[Completed]) -> str:
    """A script for zsh, with the help of each flag."""
    cases = []
    for command in commands:
        path = " ".join(command.words)
        specs = [
            shlex.quote(f"{name}[{_zsh_text(flag.help)}]" + _zsh_value(flag))
            for flag in command.flags
            for name in flag.names
        ]
        if command.subcommands:
            shown = " ".join(_zsh_word(name, text) for name, text in command.subcommands.items())
            cases.append(
                f"    '{path}') if [[ $words[CURRENT] == -* ]]; then _arguments {' '.join(specs)}; "
                f"else local -a found=({shown}); _describe command found; fi ;;"
            )
            continue
        first = f"'1:value:({' '.join(command.values)})' " if command.values else ""
        specs = [*specs, f"{first}'*:file:_files'"]
        cases.append(f"    '{path}') _arguments -S {' '.join(specs)} ;;")
    groups = "|".join(" ".join(c.words) for c in commands if c.words and c.subcommands)
    return f"""\
#compdef penstock
# Completion of penstock for zsh: save it as _penstock in a folder of $fpath, or source it.
_penstock() {{
  local command="" depth=1
  if (( CURRENT > 2 )); then
    command="$words[2]" depth=2
    if [[ "$command" == ({groups}) ]] && (( CURRENT > 3 )); then
      command="$command $words[3]" depth=3
    fi
  fi
  shift $((depth - 1)) words
  (( CURRENT -= depth - 1 ))
  case "$command" in
{chr(10).join(cases)}
  esac
}}
if [[ "$funcstack[1]" == _penstock ]]; then _penstock "$@"; else compdef _penstock penstock; fi
"""


def _zsh_text(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", "\\:")


def _zsh_word(name: str, text: str) -> str:
    return shlex.quote(f"{name}:{_zsh_text(text)}")


def _zsh_value(flag: Flag) -> str:
    if not flag.takes_value:
        return ""
    return f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files"


def fish(commands: list[Completed]) -> str:
    """A script for fish, with the help of each flag."""
    lines = ["# Completion of penstock for fish: save it in ~/.config/fish/completions."]
    for command in commands:
        seen = [f"__fish_seen_subcommand_from {word}" for word in command.words]
        if len(command.words) == 1:  # not `bench serve` for `serve`
            groups = [c.words[0] for c in commands if c.words[1:] == command.words]
            seen += [f"not __fish_seen_subcommand_from {group}" for group in groups]
        if command.subcommands:
            among = " ".join(command.subcommands)
            here = "; and ".join([*seen, f"not __fish_seen_subcommand_from {among}"])
            for name, text in command.subcommands.items():
                lines.append(f"complete -c penstock -n '{here}' -f -a {name} -d {_fish_text(text)}")
        condition = f" -n '{'; and '.join(seen)}'" if seen else " -n __fish_use_subcommand"
        if command.values:
            values = shlex.quote(" ".join(command.values))
            lines.append(f"complete -c penstock{condition} -f -a {values}")
        for flag in command.flags:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-o {name[1:]}"
                for name in flag.names
            )
            value = " -r" if flag.takes_value else ""
            if flag.choices:
                value = f" -x -a {shlex.quote(' '.join(flag.choices))}"
            lines.append(
                f"complete -c penstock{condition} {names}{value} -d {_fish_text(flag.help)}"
            )
    return "\n".join(lines) + "\n"


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
