"""Regular expressions of a checkpoint: whoever wrote it must not decide how long a load takes.

Python's matcher tries one way after another. How many there are at most follows from the pattern:
a repetition ends at any character of a name, so several of them multiply, and one inside another
doubles with every character.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.protocol.errors import ModelError

if sys.version_info >= (3, 11):
    from re import _parser as parser
else:
    import sre_parse as parser

_NAME_LENGTH = 100  # about as long as layers' names get
_MAX_WAYS = 10_000_000  # that one name is tried in: a tenth of a second
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def names_in(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names, of which some may be patterns that begin with ``re:``; () if it has none."""
    names = raw.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: {key} must be a list of names, got {names!r:.80}")
    for name in names:
        if name.startswith("re:"):
            check_pattern(f"quantization_config's {key}", name[3:])
    return tuple(names)


def object_in(
    raw: Mapping[str, Any], key: str, owner: str = "quantization_config"
) -> Mapping[str, Any]:
    """{} if it has none."""
    found = raw.get(key) or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json: {owner}'s {key} must be an object, got {found!r:.80}")
    return found


def check_pattern(field: str, pattern: str) -> None:
    """ModelError, which names the field of config.json, if matching a name may take long.

    re.error if it is no regular expression.
    """
    items: list[tuple[Any, Any]] = parser.parse(pattern).data
    try:
        runs, ways = _count(items)
        if items and str(items[-1][0]) == "MAX_REPEAT" and runs:
            runs -= 1  # nothing comes after it that could fail
    except _NestedError:
        reason = "it has a repetition or alternatives inside a repetition"
    else:
        if ways * _NAME_LENGTH**runs / math.factorial(runs) <= _MAX_WAYS:
            return
        reason = f"it has {runs} repetitions and {ways} combinations of alternatives"
    raise ModelError(
        f"config.json: {field} has the pattern {pattern!r:.200}, which may take too long to match: "
        f"{reason}. Write it in a simpler way, or as several patterns"
    )


class _NestedError(Exception):
    pass


def _count(items: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """Repetitions of any length, and in how many ways the rest may match."""
    runs, ways = 0, 1
    for operation, argument in items:
        name = str(operation)
        if name == "BRANCH":
            found = [_count(each) for each in argument[1]]
            runs += max(own for own, _ in found)
            ways *= sum(own for _, own in found)
        elif name in _REPEATS:
            least, most, body = argument
            own_runs, own_ways = _count(body)
            if most <= 1:
                runs, ways = runs + own_runs, ways * (own_ways + 1)
            elif own_runs or own_ways > 1:
                raise _NestedError
            elif least != most:
                runs += 1
        else:
            for body in _bodies(name, argument):
                own_runs, own_ways = _count(body)
                runs, ways = runs + own_runs, ways * own_ways
    return runs, ways


def _bodies(name: str, argument: Any) -> list[Any]:
    """What stands inside a group."""
    if name == "SUBPATTERN":
        return [argument[-1]]
    if name in ("ASSERT", "ASSERT_NOT"):
        return [argument[1]]
    if name == "ATOMIC_GROUP":
        return [argument]
    if name == "GROUPREF_EXISTS":
        return [body for body in argument[1:] if body is not None]
    return []
