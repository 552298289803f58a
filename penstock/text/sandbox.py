"""Where chat templates run: Jinja's immutable sandbox, with limits on time and on what is made.

Jinja's sandbox keeps a template from everything outside. It does not keep it from a loop of
billions of rounds, or from a text that doubles forty times. A thread cannot be stopped from
outside, so templates are compiled to look at the clock themselves: in every round of a loop and at
every call. What single operations could blow up (repetition, powers, widths) is checked before.
A list that holds another one twice, which holds another one twice, and so on, costs nothing until
it is written or compared: whatever makes a list, tuple or dict has it weighed (`_weighed`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from string import Formatter
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment

TIME_LIMIT_S = 10.0
MAX_TEXT = 64 * 2**20  # characters of a prompt, and of any text or list on the way to it
MAX_ITEMS = 1_000_000  # of a list
MAX_BITS = 4096  # of a number
MAX_WIDTH = 10_000  # that a text is padded to, and the largest number in a format

_WIDENING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
# A field of a % format, but for its key. A key with parentheses in it is not known as one, and so
# leaves a field with a parenthesis.
_PERCENT = re.compile(r"%(?:\([^()]*\))?([-+ #0-9.*]*[hlL]?.)", re.DOTALL)
# They read a text again, or write another one, for each tag, link or line in it. No conversation
# needs them.
_LEFT_OUT = ("striptags", "urlize", "wordwrap")


_CONTAINERS: Any = (
    list,
    tuple,
    set,
    dict,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs templates that end in time, or raise `SecurityError`.

    Templates must be compiled with `compile_limited` and run within `time_limit`.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._thread = threading.local()  # a template is rendered in several threads at once
        for name in _LEFT_OUT:
            del self.filters[name]
        for name in ("center", "indent", "batch", "slice", "truncate"):
            self.filters[name] = _with_small_numbers(self.filters[name])
        self.filters |= {
            "format": self._format,
            "indent": self._with_lines_counted(self.filters["indent"]),
            "join": self._join,
            "replace": _replace,
            "sum": self._with_timed_items(self.filters["sum"]),
            "tojson": self._tojson,
        }
        self.filters = {name: self._with_weighed(own) for name, own in self.filters.items()}
        self.filters |= {
            "_timed": self._timed, "_joined": self._joined, "_weighed": self._weighed
        }  # fmt: skip

    def compile_limited(self, source: str) -> jinja2.Template:
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter("_timed", loop.iter)
        # Inner ones first: what is replaced is not visited.
        for parent in reversed(list(tree.find_all(nodes.Node))):
            _replace_children(parent)
        return self.from_string(tree)

    @contextlib.contextmanager
    def time_limit(self) -> Iterator[None]:
        """What this thread renders in here must be done in `TIME_LIMIT_S`."""
        self._thread.deadline = time.monotonic() + TIME_LIMIT_S
        self._thread.weights = {}
        try:
            yield
        finally:
            del self._thread.deadline, self._thread.weights

    def render_limited(self, template: jinja2.Template, arguments: Mapping[str, Any]) -> str:
        """The whole text, which is not longer than `MAX_TEXT`."""
        pieces, length = [], 0
        with self.time_limit():
            for piece in template.generate(arguments):
                length += len(piece)
                _check(length, MAX_TEXT, "the prompt", "characters")
                self.check_time()
                pieces.append(piece)
        return "".join(pieces)

    def check_time(self) -> None:
        if time.monotonic() > self._thread.deadline:
            raise SecurityError(f"it took longer than {TIME_LIMIT_S:g} s")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template passes here, of macros and methods alike."""
        __self.check_time()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja has wrapped a text's `format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in _WIDENING:
                _check_widths(args)
                _check_widths(kwargs.values())
                if name == "expandtabs":
                    size = args[0] if args else kwargs.get("tabsize", 8)
                    _check(owner.count("\t") * int(size), MAX_TEXT, "a text", "characters")
            elif name in ("format", "format_map"):
                fields = [field for _, _, field, _ in Formatter().parse(owner) if field is not None]
                __self._check_format(owner, fields, "{", (args, kwargs))
            elif name == "translate":
                _check(len(owner) * __self._weigh(args), MAX_TEXT, "a text", "characters")
            elif name == "replace" and len(args) >= 2:
                _check_replace(owner, *args[:2])
            elif name == "join" and args:
                args = (_checked_items(args[0], owner), *args[1:])
        return __self._weighed(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, type(left)):
                _check_length(left, len(left) + len(right))
                if not isinstance(left, str):
                    return self._sum(left, right)
        elif operator == "%":
            if isinstance(left, str):
                self._check_format(left, _PERCENT.findall(left), "*(", right)
        elif operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, (str, list, tuple)) and isinstance(count, int):
                    _check_length(text, len(text) * count)
            if isinstance(left, int) and isinstance(right, int):
                _check(left.bit_length() + right.bit_length(), MAX_BITS, "a number", "bits")
        elif isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * abs(right), MAX_BITS, "a number", "bits")
        return self._weighed(super().call_binop(context, operator, left, right))

    def _sum(self, left: Any, right: Any) -> Any:
        """Of two lists, weighed by what they weigh: a list may grow in as many steps as it has
        items. The sum is remembered in the place of `left`."""
        weight = self._weigh(left) + self._weigh(right) - 2
        _check(weight, MAX_TEXT, "a list or object", "characters")
        total = left + right
        known: dict[int, tuple[Any, int]] = getattr(self._thread, "weights", {})
        known.pop(id(left), None)
        known[id(total)] = total, weight
        return total

    def _weighed(self, value: Any) -> Any:
        """The same value, unless it would be too long a text if it were written."""
        if isinstance(value, _CONTAINERS):
            _check(self._weigh(value), MAX_TEXT, "a list or object", "characters")
        return value

    def _weigh(self, value: Any) -> int:
        """About how many characters a value has as text, each time that it is there.

        What a container holds is weighed once: templates cannot change lists and dicts.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, _CONTAINERS):
            return 8
        # There is none while a template is compiled, where constants are weighed.
        known: dict[int, tuple[Any, int]] = getattr(self._thread, "weights", {})
        if id(value) in known:
            return known[id(value)][1]
        total = 2
        parts: Iterable[Any] = value
        if isinstance(value, dict):
            parts = (*value, *value.values())
        for part in parts:
            if isinstance(part, str):
                total += len(part) + 2
            elif not isinstance(part, _CONTAINERS):
                total += 8
            else:
                if id(part) not in known:
                    known[id(part)] = part, self._weigh(part)  # kept, so that the id stays its own
                total += known[id(part)][1]
        return total

    def _with_weighed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # and with what it tells Jinja about itself
        def weighed(*args: Any, **kwargs: Any) -> Any:
            return self._weighed(original(*args, **kwargs))

        return weighed

    def _with_lines_counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def limited(s: Any, width: Any = 4, *args: Any, **kwargs: Any) -> Any:
            size = len(width) if isinstance(width, str) else width
            lines = str(s).count("\n") + 1
            _check(lines * int(size), MAX_TEXT, "a text", "characters")
            return original(s, width, *args, **kwargs)

        return limited

    def _with_timed_items(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(environment: Any, iterable: Any, *args: Any, **kwargs: Any) -> Any:
            return original(environment, self._timed_one_by_one(iterable), *args, **kwargs)

        return timed

    def _check_format(self, text: str, fields: list[str], bad: str, arguments: Any) -> None:
        """`fields` are what a format says of widths; `bad` are characters that none may have."""
        all_of_them = " ".join(fields)
        numbers = re.findall(r"\d+", all_of_them)
        is_wide = any(len(number) > 4 for number in numbers)
        if is_wide or any(character in all_of_them for character in bad):
            raise SecurityError("a format has a width that is too large, or given by an argument")
        widest = max(map(int, numbers), default=0)
        longest = len(text) + len(fields) * (widest + self._weigh(arguments))
        _check(longest, MAX_TEXT, "a text", "characters")

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        text = str(value)
        self._check_format(text, _PERCENT.findall(text), "*(", (args, kwargs))
        return text % (kwargs or args)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As models were trained on: Jinja's own would escape HTML's characters."""
        _check_widths([len(indent) if isinstance(indent, str) else indent])
        if separators is not None:
            longest = max(map(len, separators), default=0)
            _check(longest * self._weigh(value) // 2, MAX_TEXT, "a text", "characters")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return encoder.encode(value)
        pieces, length = [], 0
        for piece in encoder.iterencode(value):
            length += len(piece)
            _check(length, MAX_TEXT, "a text", "characters")
            pieces.append(piece)
        return "".join(pieces)

    def _timed(self, items: Iterable[Any]) -> Iterable[Any]:
        """The same items, while there is time."""
        if not isinstance(items, (list, tuple, dict, str, range)):
            return self._timed_one_by_one(items)
        # What knows its length stays as it is: loops then can tell how many rounds are left.
        self.check_time()
        return _TimedSequence(self, items)

    def _timed_one_by_one(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check_time()
            yield item

    def _join(self, items: Any, separator: Any = "", attribute: Any = None) -> str:
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        between = str(separator)
        return between.join(_checked_items(map(str, items), between))

    def _joined(self, parts: list[Any]) -> str:
        """What `~` makes of its operands."""
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)), MAX_TEXT, "a text", "characters")
        return "".join(texts)


class _TimedSequence:
    """Iterates with an eye on the clock; has a length, if a loop should ask."""

    def __init__(self, environment: LimitedEnvironment, items: Any) -> None:
        self._environment = environment
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._environment.check_time()
            yield item


def _filter(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _replace_children(parent: nodes.Node) -> None:
    for field, value in parent.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(parent, field, _guarded(value))
        elif isinstance(value, list):
            setattr(parent, field, [_guarded(x) for x in value])


def _guarded(node: Any) -> Any:
    """What an expression becomes, if it must look at what it makes: `a ~ b`, `[a, b]`, `{a: b}`."""
    if isinstance(node, nodes.Concat):
        return _filter("_joined", nodes.List(node.nodes, lineno=node.lineno))
    is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
    if isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and not is_target:
        return _filter("_weighed", node)
    return node


def _check(value: int, limit: int, what: str, unit: str) -> None:
    if value > limit:
        raise SecurityError(f"{what} would have {value} {unit}, more than the {limit} allowed")


def _check_length(value: Any, length: int) -> None:
    if isinstance(value, str):
        _check(length, MAX_TEXT, "a text", "characters")
    else:
        _check(length, MAX_ITEMS, "a list", "items")


def _check_widths(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int):
            _check(value, MAX_WIDTH, "a text", "columns")


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        count = text.count(old) if old else len(text) + 1
        _check(len(text) + count * len(new), MAX_TEXT, "a text", "characters")


def _checked_items(items: Any, separator: str) -> list[Any]:
    checked, length = [], 0
    for item in items:
        length += len(separator) + (len(item) if isinstance(item, str) else 0)
        _check(length, MAX_TEXT, "a text", "characters")
        checked.append(item)
    return checked


def _with_small_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # and with what it tells Jinja about itself
    def limited(*args: Any, **kwargs: Any) -> Any:
        _check_widths(args)
        _check_widths(kwargs.values())
        return original(*args, **kwargs)

    return limited


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(value), str(old), str(new)
    _check_replace(text, old, new)
    return text.replace(old, new, -1 if count is None else count)
