"""Reads calls written as JSON: an object with name and arguments, or a name, then arguments."""

from __future__ import annotations

from collections.abc import Collection

from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.json_text import (
    load_json,
    read_object_keys,
    read_value,
    read_whole_value,
    to_json,
)
from penstock.text.parsing.stream import Malformed, Sink, Steps, TextStream
from penstock.text.parsing.tool_format import check_name

_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")


def read_arguments(stream: TextStream, sink: Sink) -> Steps[None]:
    """A call's arguments: an object, an object written as a string, or null for none."""
    char = yield from stream.next_char()
    if char == "{":
        yield from read_value(stream, sink)
        return
    value = yield from read_whole_value(stream)
    if isinstance(value, str):
        sink(_object_within(value))
    elif value is None:
        sink("{}")
    else:
        raise Malformed(f"arguments must be an object, got {value!r:.40}")


def _object_within(text: str) -> str:
    if not text.strip():
        return "{}"
    try:
        value = load_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Malformed(f"arguments must be an object, got {text!r:.40}")
    return to_json(value)


def read_named_call(
    stream: TextStream, out: Emitter, name: str, ends: tuple[str, ...], call_id: str | None = None
) -> Steps[None]:
    """The arguments of a call with a known name. No arguments before one of `ends` mean `{}`."""
    name = check_name(name)
    yield from stream.skip_space()
    if ends and (yield from stream.next_is(*ends)) is not None:
        out.start_call(name, call_id)
        out.arguments("{}")
    elif (yield from stream.next_char()) == "{":
        out.start_call(name, call_id)
        yield from read_arguments(stream, out.arguments)
    else:
        pieces: list[str] = []
        yield from read_arguments(stream, pieces.append)
        out.start_call(name, call_id)
        out.arguments("".join(pieces))
    out.end_call()


def read_call_object(
    stream: TextStream, out: Emitter, known_names: Collection[str] | None = None
) -> Steps[None]:
    """A call as one object, with its keys in any order.

    With `known_names`, an object that names another function, or whose keys show that it is
    something else, is Malformed as soon as that is certain.
    """
    name: str | None = None
    call_id: str | None = None
    early_arguments: str | None = None  # arguments before the name
    started = False
    is_within = False  # inside an object under `function`, which does not nest

    def start() -> None:
        nonlocal started
        assert name is not None
        started = True
        out.start_call(name, call_id)

    def set_name(value: object) -> None:
        nonlocal name
        name = check_name(value)
        if known_names is not None and name not in known_names:
            raise Malformed(f"there is no tool {name!r}")

    def on_key(key: str) -> Steps[None]:
        nonlocal call_id, early_arguments, is_within
        if key in _ARGUMENT_KEYS and not started:
            if name is not None:
                start()
                yield from read_arguments(stream, out.arguments)
                return
            pieces: list[str] = []
            yield from read_arguments(stream, pieces.append)
            early_arguments = "".join(pieces)
        elif (
            key == "function"
            and name is None
            and not is_within
            and (yield from stream.next_is("{"))
        ):
            is_within = True
            yield from read_object_keys(stream, on_key)
            is_within = False
        elif key in ("name", "function") and name is None:
            set_name((yield from read_whole_value(stream)))
        elif known_names is not None and name is None and key not in _OTHER_KEYS:
            raise Malformed(f"{key!r:.40} is not a key of a call")
        else:
            value = yield from read_whole_value(stream)
            if key == "id" and isinstance(value, str) and value.isprintable():
                call_id = value or None

    yield from read_object_keys(stream, on_key)
    if name is None:
        raise Malformed("the call names no function")
    if not started:
        start()
        out.arguments(early_arguments or "{}")
    out.end_call()


def read_call_objects(
    stream: TextStream, out: Emitter, known_names: Collection[str] | None = None
) -> Steps[None]:
    """One call as an object, or several in an array."""
    yield from stream.skip_space()
    if not (yield from stream.accept("[")):
        yield from read_call_object(stream, out, known_names)
        return
    while True:
        yield from stream.skip_space()
        yield from read_call_object(stream, out, known_names)
        yield from stream.skip_space()
        if (yield from stream.expect(",", "]")) == "]":
            return
