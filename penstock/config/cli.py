"""Flags, made from the configuration: engine options, sampling parameters and the YAML file.

Only what a user gave ends up in the dictionaries built here, so that a default is known in one
place: where it is declared.
"""

from __future__ import annotations

import argparse
import decimal
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.config.engine import EngineConfig, all_options
from penstock.config.options import Option, coerce, options_of, parse_bytes, refuse_unknown_option
from penstock.config.sampling import sampling_options
from penstock.config.server import ServerConfig
from penstock.config.vllm_names import NOT_NEEDED, NOT_SUPPORTED, SHORT_FLAGS, leave_out_foreign
from penstock.protocol.errors import ConfigError
from penstock.protocol.sampling import SamplingParams

# What makes no sense on a command line: the commands print text and choose the output kind
# themselves. `seed` is missing because the engine's --seed is it.
_NO_FLAG = {
    "seed",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "spaces_between_special_tokens",
    "output_kind",
    "structured_outputs",
    "speculative",
    "extra_args",
}


_FOREIGN = NOT_NEEDED | NOT_SUPPORTED


def add_engine_arguments(
    parser: argparse.ArgumentParser, several: Collection[str] = (), complete: bool = False
) -> None:
    """One flag for every engine option, grouped by section, and ``--config``.

    `several` names lists whose flag may take several values at once (`--flag a b`). The last one
    may then have been meant as the command's own argument: `flag_of_several` in the namespace is
    the flag that was given so, for the command to look at. Nothing else is in the namespace besides
    the options that were given, `config` and `foreign`.

    With `complete` the namespace has every option by its name, given or not, also those that only
    vLLM has. The file is read when its flag is met: flags after it take precedence.
    """
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        action=_ReadFile if complete else "store",
        default=argparse.SUPPRESS,
        help="YAML file with options by name. Flags take precedence.",
    )
    for section, options in all_options().items():
        group = parser.add_argument_group(f"{section} options")
        for declared in options:
            _add_flag(group, declared, takes_several=declared.name in several)
    _add_foreign_flags(parser, apart=not complete)
    if complete:
        parser.set_defaults(**EngineConfig().options())


def add_server_arguments(
    parser: argparse.ArgumentParser,
    several: Collection[str] = (),
    only: Collection[str] | None = None,
) -> None:
    """One flag for every option of the server, or for those in `only`."""
    group = parser.add_argument_group("server options")
    for declared in options_of(ServerConfig):
        if only is None or declared.name in only:
            _add_flag(group, declared, takes_several=declared.name in several)


def engine_options_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that the user gave, flags over the ``--config`` file.

    Raises `ConfigError` for anything that an engine would refuse, before one is made.
    """
    options = read_config_file(args.config) if hasattr(args, "config") else {}
    options |= _given(args, *all_options().values())
    leave_out_foreign(getattr(args, "foreign", {}))
    EngineConfig.from_options(options)
    return options


def serve_options_from_args(
    args: argparse.Namespace, only: Collection[str] | None = None
) -> tuple[EngineConfig, ServerConfig]:
    """The configuration of a server and its engine: flags over the ``--config`` file.

    `only` names the server's options that the command has; others are refused in the file.
    """
    ours = [option for option in options_of(ServerConfig) if only is None or option.name in only]
    engine = read_config_file(args.config, extra=ours) if hasattr(args, "config") else {}
    server = {option.name: engine.pop(option.name) for option in ours if option.name in engine}
    server |= _given(args, ours)
    engine |= _given(args, *all_options().values())
    leave_out_foreign(getattr(args, "foreign", {}))
    return EngineConfig.from_options(engine), ServerConfig.from_options(server)


def _given(args: argparse.Namespace, *sections: Iterable[Option]) -> dict[str, Any]:
    """The options of these sections that were given as flags."""
    names = [declared.name for section in sections for declared in section]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def read_config_file(path: Path, extra: Iterable[Option] = ()) -> dict[str, Any]:
    """Engine options from a flat YAML mapping; names are written with ``-`` or ``_``.

    `extra` are options that may stand there besides. Raises `ConfigError`, with the file's name,
    for what cannot be read or is no option.
    """
    import yaml  # costs more than the rest of the command line together

    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must map option names to values, got {content!r}")
    sections = (*all_options().values(), extra)
    declared = {option.name: option for section in sections for option in section}
    options: dict[str, Any] = {}
    try:
        for key, value in leave_out_foreign(content).items():
            name = str(key).replace("-", "_")
            if name not in declared:
                refuse_unknown_option(str(key), declared)
            if name in options:
                raise ConfigError(f"{name} is given twice, once as {key!r}")
            item = declared[name]
            is_count = item.type is int and not item.is_list and not name.endswith("_bytes")
            if is_count and isinstance(value, str):
                value = _parse_count(name, value)
            options[name] = coerce(item, value)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return options


def add_sampling_arguments(
    parser: argparse.ArgumentParser,
    *,
    max_tokens: int,
    others: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """One flag for every sampling parameter that fits a command line.

    `max_tokens` is this command's own default, and `others` are more of them, which the command
    itself applies.
    """
    defaults = {"max_tokens": max_tokens, **others}
    group = parser.add_argument_group(
        "sampling",
        "The model's own defaults, if it has any, take precedence over those shown here. "
        "--seed above also seeds sampling.",
    )
    for declared in sampling_options():
        if declared.name not in _NO_FLAG:
            default = defaults.get(declared.name, declared.default)
            _add_flag(group, declared, default=default)
    parser.set_defaults(max_tokens=max_tokens)


def sampling_options_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that the user or the command gave, checked."""
    options = {
        declared.name: getattr(args, declared.name)
        for declared in sampling_options()
        if hasattr(args, declared.name)
    }
    SamplingParams(**options)
    return options


def override(defaults: SamplingParams, options: dict[str, Any]) -> SamplingParams:
    """`defaults` with `options` in place of what they name, checked anew."""
    return SamplingParams(**{**msgspec.structs.asdict(defaults), **options})


def expand_dotted_flags(argv: Sequence[str]) -> list[str]:
    """`--option.key VALUE` as `--option {"key": VALUE}`, for options that take a JSON object.

    VALUE is JSON, or else a text.
    """
    every = [option for options in all_options().values() for option in options]
    objects = {option.flag for option in every if option.type is dict}
    objects |= {_flag(name) for name, foreign in _FOREIGN.items() if not foreign.switch}
    expanded: list[str] = []
    rest = iter(argv)
    for argument in rest:
        flag, dot, key = argument.partition(".")
        if argument == "--":
            return [*expanded, argument, *rest]
        if not dot or flag not in objects:
            expanded.append(argument)
            continue
        key, separator, value = key.partition("=")
        found = value if separator else next(rest, None)
        if found is None or (not separator and found.startswith("--")):
            raise ConfigError(f"argument {flag}.{key}: expected a value")
        expanded += [flag, json.dumps({key: _value_of(found)})]
    return expanded


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


_UNSET = object()


class _Action(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        self.take(namespace, values, option_string)

    def take(self, namespace: argparse.Namespace, values: Any, flag: str | None) -> None:
        """Note a flag and its values."""
        raise NotImplementedError


class _Collect(_Action):
    """Joins the values of a flag that may be repeated: lists in order, objects by key.

    Of two values for a key, the later one counts.
    """

    def take(self, namespace: argparse.Namespace, values: Any, flag: str | None) -> None:
        if isinstance(values, dict):
            known = getattr(namespace, self.dest, None) or {}
            setattr(namespace, self.dest, {**known, **values})
            return
        several = values if self.nargs == "+" else [values]
        items = itertools.chain(getattr(namespace, self.dest, None) or [], *several)
        setattr(namespace, self.dest, list(items))
        if len(several) > 1:
            namespace.flag_of_several = flag


class _ReadFile(_Action):
    """Takes the options of a file."""

    def take(self, namespace: argparse.Namespace, values: Any, flag: str | None) -> None:
        vars(namespace).update(read_config_file(values))


class _StoreForeign(_Action):
    """Notes an option of vLLM with its value."""

    def take(self, namespace: argparse.Namespace, values: Any, flag: str | None) -> None:
        long = next(name for name in self.option_strings if name.startswith("--"))
        value = flag == long if self.nargs == 0 else _value_of(values)
        namespace.foreign = {**getattr(namespace, "foreign", {}), long: value}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_foreign_flags(parser: argparse.ArgumentParser, apart: bool) -> None:
    """Flags of vLLM that are not flags here, so that `leave_out_foreign` can say what to do."""
    for name, foreign in _FOREIGN.items():
        flags = [_flag(name)]
        flags += [short for short, option in SHORT_FLAGS.items() if option == name]
        if not apart and foreign.switch:
            switch = argparse.BooleanOptionalAction
            parser.add_argument(*flags, action=switch, default=False, help=argparse.SUPPRESS)
            continue
        if not apart:
            parser.add_argument(*flags, type=_value_of, help=argparse.SUPPRESS)
            continue
        if foreign.switch:
            flags.append(_flag(f"no_{name}"))
        parser.add_argument(
            *flags,
            action=_StoreForeign,
            dest="foreign",
            default=argparse.SUPPRESS,
            nargs=0 if foreign.switch else None,
            help=argparse.SUPPRESS,
        )


def _add_flag(
    group: argparse._ArgumentGroup,
    declared: Option,
    *,
    default: object = _UNSET,
    takes_several: bool = False,
) -> None:
    shown = declared.default if default is _UNSET else default
    text = declared.help
    if shown not in (None, []) and "default:" not in text:
        text = f"{text} (default: {_as_typed(shown)})"
    settings: dict[str, Any] = {
        "dest": declared.name,
        "default": argparse.SUPPRESS,  # absent from the namespace unless given
        "help": text.replace("%", "%%"),
    }
    taken = group._option_string_actions  # by the command, as -q of chat
    short = [flag for flag, name in SHORT_FLAGS.items() if name == declared.name]
    short = [flag for flag in short if flag not in taken]
    if declared.type is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(declared.flag, *short, action=action, **settings)
        return
    if declared.choices:
        settings["choices"] = declared.choices
    else:
        settings["type"], settings["metavar"] = _parser_and_metavar(declared)
    if declared.type is dict:
        settings["action"] = _Collect
    elif declared.is_list:
        settings["action"] = _Collect
        # Else once for each value: a flag that takes several would swallow the prompts after it.
        if takes_several:
            settings["nargs"] = "+"
        else:
            settings["help"] += " Can be given several times."
    group.add_argument(declared.flag, *short, **settings)


def _as_typed(value: object) -> str:
    """A default as one would write it on the command line."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _parser_and_metavar(declared: Option) -> tuple[Callable[[str], Any], str]:
    if declared.name.endswith("_bytes"):
        return _reporting(lambda text: parse_bytes(declared.name, text)), "SIZE"
    if declared.type is dict:
        parse = _parse_biases if declared.name == "logit_bias" else _parse_object
        return _reporting(lambda text: parse(declared.name, text)), "JSON"
    metavar = {int: "N", float: "X", str: "TEXT"}[declared.type]
    if declared.is_list:
        return _reporting(lambda text: _parse_items(declared, text)), metavar
    if declared.type is int:
        return _reporting(lambda text: _parse_count(declared.name, text)), metavar
    return declared.type, metavar


def _reporting(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, with its ConfigError as the error that argparse knows how to show."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _parse_items(declared: Option, text: str) -> list[Any]:
    """One item, or a JSON list of them."""
    if not text.startswith("["):
        return [declared.type(text)]
    try:
        return msgspec.json.decode(text, type=list[declared.type])  # type: ignore[name-defined]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{declared.name} must be a JSON list, got {text!r}") from error


def _parse_count(name: str, text: str) -> int:
    """``"4096"``, ``"8k"`` (8000), ``"1.5m"`` (1,500,000) or ``"8K"`` (8192) as a number.

    ``"auto"`` of max_model_len is -1.
    """
    if (name, text) == ("max_model_len", "auto"):
        return -1
    powers = {"k": 1, "m": 2, "g": 3, "t": 4}
    unit = text[-1:]
    if unit.lower() not in powers:
        number, factor = text, 1
    else:
        number, factor = text[:-1], (1000 if unit.islower() else 1024) ** powers[unit.lower()]
    try:
        value = decimal.Decimal(number) * factor
        if value == int(value):
            return int(value)
    except (decimal.InvalidOperation, OverflowError, ValueError):
        pass
    raise ConfigError(f"{name} must be a whole number such as 4096, 8k or 8K, got {text!r}")


def _parse_object(name: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name} must be a JSON object, got {text!r}") from error


def _parse_biases(name: str, text: str) -> dict[int, float]:
    try:
        return msgspec.json.decode(text, type=dict[int, float])
    except msgspec.MsgspecError as error:
        example = json.dumps({"42": -100})
        raise ConfigError(f"{name} must be JSON such as {example}, got {text!r}") from error
