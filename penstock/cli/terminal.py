"""What a conversation needs from a terminal: lines with history, and Markdown."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

QUOTES = '"""'
HISTORY_LENGTH = 1000

Show = Callable[[str], None]


def notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_lines(history: Path) -> Iterator[str]:
    """Yield lines as the user types them, until Ctrl-D. Ctrl-C discards the line.

    With Python's readline, lines can be edited, and earlier ones are kept in `history`.
    """
    readline = _open_history(history)
    notice(f"Type a message; {QUOTES} begins and ends several lines; /help lists what else.")
    try:
        while True:
            try:
                yield input("> ")
            except KeyboardInterrupt:
                notice("\n/exit or Ctrl-D leaves.")
            except EOFError:
                notice("")
                return
    finally:
        if readline is not None:
            with contextlib.suppress(OSError):  # as on a full disk: the chat is over anyway
                history.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(history)


def _open_history(history: Path) -> Any:
    """Python's readline, if it was built with it."""
    try:
        readline = importlib.import_module("readline")
    except ImportError:
        return None
    with contextlib.suppress(OSError):  # there is none so far
        readline.read_history_file(history)
    readline.set_history_length(HISTORY_LENGTH)
    return readline


def join_quoted(lines: Iterable[str]) -> Iterator[str]:
    '''Join the lines from one that begins with """ to one that ends with """.'''
    held: list[str] | None = None
    for line in lines:
        text = line.rstrip("\r\n")
        if held is None:
            if not text.lstrip().startswith(QUOTES):
                yield line
                continue
            held, text = [], text.lstrip().removeprefix(QUOTES)
        if text.rstrip().endswith(QUOTES):
            yield "\n".join([*held, text.rstrip().removesuffix(QUOTES)])
            held = None
        else:
            held.append(text)
    if held:
        yield "\n".join(held)


@contextlib.contextmanager
def printing(renders: bool) -> Iterator[Show]:
    """Print a text in pieces to standard output. `renders`: as Markdown, if rich is installed."""
    live = _open_markdown() if renders else None
    if live is None:
        yield lambda text: print(text, end="", flush=True)
        print(flush=True)
        return
    update, close = live
    text = ""

    def show(piece: str) -> None:
        nonlocal text
        text += piece
        update(text)

    try:
        yield show
    finally:
        close()


def _open_markdown() -> tuple[Show, Callable[[], None]] | None:
    """Functions that show a whole text, and that end it. None without rich."""
    try:
        live_module = importlib.import_module("rich.live")
        markdown = importlib.import_module("rich.markdown").Markdown
    except ImportError:
        return None
    live = live_module.Live(vertical_overflow="visible", refresh_per_second=8)

    def update(text: str) -> None:
        live.update(markdown(text))
        live.start()  # does nothing if it has started

    return update, live.stop
