"""How a configuration field is declared: its default and its help text in one place.

CLI flags, ``LLM(...)`` keywords, the YAML file and the reference page are all made from the
dataclasses that use `option`, so an option cannot exist without its documentation.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from penstock.config.hints import hint_for
from penstock.config.vllm_names import KEYS, leave_out_keys
from penstock.protocol.errors import ConfigError, ModelError

_HELP = "help"


def option(default: Any, help: str) -> Any:
    """A documented dataclass field. `help` is one or two plain sentences.

    A field whose default is `dataclasses.MISSING` is required.
    """
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={_HELP: help})
    return dataclasses.field(default=default, metadata={_HELP: help})


def require(
    config: object, *names: str, least: float | None = None, above: float | None = None
) -> None:
    """Raise `ConfigError` for one of these options that is too small; None is never."""
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if least is not None and value < least:
            raise ConfigError(f"{name} must be at least {least:g}, got {value}")
        if above is not None and value <= above:
            raise ConfigError(f"{name} must be above {above:g}, got {value}")


@dataclass(frozen=True)
class Option:
    """One option as the CLI, the YAML reader and the docs see it."""

    name: str
    help: str
    default: Any
    type: type  # bool, int, float, str, dict; the element type where `is_list`
    optional: bool  # None is a value
    is_list: bool
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def options_of(config_class: type) -> Iterator[Option]:
    """The options that a config dataclass declares, in order."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if _HELP not in field.metadata:
            continue
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield describe(field.name, field.metadata[_HELP], default, hints[field.name])


def describe(name: str, help: str, default: Any, hint: Any) -> Option:
    """An option from its type hint: a plain type, a `Literal`, a list or a dict, or None too."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        members = [arg for arg in get_args(hint) if arg is not type(None)]
        optional = len(members) < len(get_args(hint))
        hint = members[-1]  # of `str | list[str]`, the list, which holds either
    is_list = get_origin(hint) is list
    if is_list:
        (hint,) = get_args(hint)
    choices: tuple[str, ...] = ()
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        hint = str
    if get_origin(hint) is dict:
        hint = dict
    return Option(name, help, default, hint, optional, is_list, choices)


def coerce(declared: Option, value: Any) -> Any:
    """`value` as the option's type, or a ConfigError that names both."""
    if value is None and declared.optional:
        return None
    if declared.is_list:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise ConfigError(f"{declared.name} must be a list, got {value!r}")
        for item in items:
            if type(item) is not declared.type:
                raise ConfigError(
                    f"{declared.name} must be a list of {declared.type.__name__}, got {value!r}"
                )
        return list(items)
    if declared.choices and value not in declared.choices:
        allowed = ", ".join(declared.choices)
        raise ConfigError(f"{declared.name} must be one of {allowed}, got {value!r}")
    if declared.type is int and isinstance(value, str) and declared.name.endswith("_bytes"):
        return parse_bytes(declared.name, value)
    if declared.type is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if declared.type is str and hasattr(value, "__fspath__"):
        return str(value)
    if type(value) is not declared.type:
        raise ConfigError(f"{declared.name} must be {declared.type.__name__}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{declared.name} must be a finite number, got {value}")
    return value


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """A list of numbers and ranges such as 0-3,8. Raises `ConfigError`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        bounds = [item.strip() for item in (first, last if dash else first)]
        if not all(item.isascii() and item.isdigit() and len(item) < 6 for item in bounds):
            raise ConfigError(f"{name} must be numbers and ranges such as 0-3,8, got {text!r}")
        numbers += range(int(bounds[0]), int(bounds[1]) + 1)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(f"{name} must name each number once, got {text!r}")
    return tuple(numbers)


def parse_bytes(name: str, text: str) -> int:
    """``"4GiB"``, ``"500M"`` or ``"1048576"`` as a number of bytes."""
    units = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:] in units else ""
    try:
        return int(float(number.removesuffix(unit)) * units[unit])
    except (ValueError, OverflowError):
        raise ConfigError(f"{name} must be a size such as 4GiB, got {text!r}") from None


def parse_keys(config_class: type, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a config dataclass from the JSON object of an option with this name.

    Raises `ConfigError`, with the key.
    """
    declared = {key.name: key for key in options_of(config_class)}
    table = KEYS.get(name, {})
    given = leave_out_keys(given, table)
    for key in given:
        if key not in declared:
            hint = hint_for(str(key), declared, table) or f"keys: {', '.join(declared)}"
            raise ConfigError(f"unknown key {key!r}; {hint}")
    return {key: coerce(declared[key], value) for key, value in given.items()}


@contextmanager
def naming_option(name: str) -> Iterator[None]:
    """Errors in the settings within an option, and in what they name, begin with its name."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(f"{name}: {error}") from error.__cause__


def refuse_unknown_option(name: str, known: Iterable[str]) -> NoReturn:
    """Raise the ConfigError for a name that none of `known` is, with a hint."""
    hint = hint_for(name, known)
    raise ConfigError(f"unknown option {name!r}" + (f"; {hint}" if hint else ""))
