"""`penstock chat`: a conversation in the terminal. Streams answers to standard output."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

from penstock.cli.attachments import attachment
from penstock.cli.common import check, open_llm, text_options
from penstock.config.cli import add_engine_arguments, add_sampling_arguments, override
from penstock.protocol.errors import InputError, PenstockError
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import OutputKind, SamplingParams

DEFAULT_MAX_TOKENS = 512
COMMANDS_HELP = """\
/reset         forget the conversation
/system TEXT   set the system prompt and start anew; without TEXT, remove it
/image FILE    send an image or a video (a file or a URL) with the next message
/help          show this
/exit          leave; Ctrl-D does too
Ctrl-C stops an answer."""

Message = dict[str, Any]


class Stream(Protocol):
    """The type of `LLM.stream`. Leaving the loop early aborts the request."""

    def __call__(
        self, prompt: list[Message], params: SamplingParams, /
    ) -> Iterator[RequestOutput]: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system-prompt", metavar="TEXT", help="System prompt.")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="Send an image or a video, a file or a URL, with the first message. Repeatable.",
    )
    add_engine_arguments(parser)
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)


def run(args: argparse.Namespace) -> int:
    options, sampling = text_options(args)
    if sampling.get("n", 1) != 1:
        raise InputError(f"chat gives one answer at a time, got n={sampling['n']}", "n")
    sampling["output_kind"] = OutputKind.DELTA
    with open_llm(options) as llm:
        params = override(llm.get_default_sampling_params(), sampling)
        interactive = sys.stdin.isatty()
        chat = Chat(llm.stream, params, args.system_prompt, interactive=interactive)
        chat.attached = [attachment(source) for source in args.image]
        chat.loop(read_from_terminal() if interactive else iter(sys.stdin))
    return 0


def read_from_terminal() -> Iterator[str]:
    """Yield lines as the user types them, until Ctrl-D. Ctrl-C discards the line."""
    with contextlib.suppress(ImportError):  # line editing, if Python was built with it
        importlib.import_module("readline")
    notice("Type a message; /help lists what else.")
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            notice("\n/exit or Ctrl-D leaves.")
        except EOFError:
            notice("")
            return


class Chat:
    """Owns the messages of the conversation and handles lines of input."""

    def __init__(
        self,
        stream: Stream,
        params: SamplingParams,
        system_prompt: str | None = None,
        *,
        interactive: bool = False,
    ) -> None:
        self._stream = stream
        self._params = params
        self._interactive = interactive
        self.attached: list[dict[str, Any]] = []  # sent before the next message's text
        self.start(system_prompt)

    def start(self, system_prompt: str | None) -> None:
        """Start a new conversation."""
        self.system_prompt = system_prompt
        self.messages: list[Message] = []
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})

    def loop(self, lines: Iterator[str]) -> None:
        """Answer each line until the input ends or a line is ``/exit``.

        A failed answer ends the loop unless the chat is interactive.
        """
        for line in lines:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            try:
                if text.startswith("/"):
                    self.obey(text)
                elif text:
                    self.answer(text)
            except PenstockError as error:
                if not self._interactive:
                    raise
                notice(f"penstock: error: {error}")

    def obey(self, text: str) -> None:
        """Run a command: a line that begins with a slash."""
        command, _, argument = text.partition(" ")
        if command == "/reset":
            self.start(self.system_prompt)
            notice("The conversation is forgotten.")
        elif command == "/system":
            self.start(argument.strip() or None)
            notice("The system prompt is " + ("set." if self.system_prompt else "removed."))
        elif command == "/image":
            self.attached.append(attachment(argument.strip()))
        elif command == "/help":
            notice(COMMANDS_HELP)
        else:
            raise InputError(f"unknown command {command}; /help lists those there are")

    def answer(self, text: str) -> None:
        """Stream the model's answer and add both turns to the conversation.

        An answer that Ctrl-C stopped is kept so far. A failed answer changes nothing.
        """
        content = [*self.attached, {"type": "text", "text": text}] if self.attached else text
        conversation = [*self.messages, {"role": "user", "content": content}]
        pieces: list[str] = []
        num_tokens = 0
        start = time.perf_counter()
        with _Interrupt() as interrupt:
            for output in self._stream(conversation, self._params):
                completion = check(output).outputs[0]
                pieces.append(completion.text)
                num_tokens += len(completion.token_ids)
                print(completion.text, end="", flush=True)
                if interrupt.requested:
                    break
        elapsed = time.perf_counter() - start
        print(flush=True)
        notice(f"[{num_tokens} tokens, {num_tokens / elapsed:.1f} tokens/s]")
        self.messages = [*conversation, {"role": "assistant", "content": "".join(pieces)}]
        self.attached = []


class _Interrupt:
    """Defers the first Ctrl-C, so that it does not interrupt the engine in the middle of a step.

    A second one raises KeyboardInterrupt, in case the engine hangs.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> _Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
