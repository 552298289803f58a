"""Guards against regular expressions of untrusted checkpoints that would hang the load.

A confined process first tries each on the names of the model's layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.confined.errors import JobError, TooMuchMemory, TooMuchTime
from penstock.confined.expressions import ExpressionTrials
from penstock.protocol.errors import ModelError

MAX_EXPRESSIONS = 256  # fewer than Python keeps compiled
MAX_TOTAL_S = 10.0  # CPU time of all together


class Expression(NamedTuple):
    field: str  # of quantization_config
    pattern: str


def names_in(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names, some of them patterns that start with ``re:``; () if missing."""
    names = raw.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: {key} must be a list of names, got {names!r:.80}")
    return tuple(names)


def object_in(
    raw: Mapping[str, Any], key: str, owner: str = "quantization_config"
) -> Mapping[str, Any]:
    """An object; {} if missing."""
    found = raw.get(key) or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json: {owner}'s {key} must be an object, got {found!r:.80}")
    return found


def find_expressions(raw: Mapping[str, Any]) -> tuple[Expression, ...]:
    """All patterns of a `quantization_config`: names with ``re:``, and keys of `dynamic`."""
    return tuple(dict.fromkeys(_walk("", raw)))


def expression_of(pattern: str) -> str:
    """The expression of an entry of `dynamic`, without the sign for include or exclude."""
    return pattern[2:] if pattern[:2] in ("+:", "-:") else pattern


def _walk(field: str, value: Any) -> Iterator[Expression]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if field == "dynamic":
                yield Expression(field, expression_of(str(key)))
            yield from _walk(str(key), item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(field, item)
    elif isinstance(value, str) and value.startswith("re:"):
        yield Expression(field, value[3:])


def try_expressions(expressions: Sequence[Expression], names: Sequence[str]) -> None:
    """Raise ModelError, which names the field, for a bad expression or one that is too slow."""
    if not expressions:
        return
    if len(expressions) > MAX_EXPRESSIONS:
        raise ModelError(
            f"config.json: quantization_config has {len(expressions)} patterns, and may have "
            f"{MAX_EXPRESSIONS}: use fewer"
        )
    total_s = 0.0
    with contextlib.closing(ExpressionTrials()) as trials:
        for field, pattern in expressions:
            where = f"config.json: quantization_config's {field} has the pattern {pattern!r:.200}"
            try:
                total_s += trials.match(pattern, names)
            except ValueError as error:
                raise ModelError(f"{where}, which is not a regular expression: {error}") from error
            except (TooMuchTime, TooMuchMemory) as error:
                raise ModelError(
                    f"{where}, which takes too long to match: {error}. Simplify it"
                ) from error
            except JobError as error:
                raise ModelError(f"{where}, which could not be tested: {error}") from error
            if total_s > MAX_TOTAL_S:
                raise ModelError(
                    f"config.json: the patterns of quantization_config take more than "
                    f"{MAX_TOTAL_S:g} s to match: simplify them"
                )
