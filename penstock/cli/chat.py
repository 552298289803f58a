"""`penstock chat`: a conversation in the terminal. Streams answers to standard output."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from penstock.cli.attachments import attachment
from penstock.cli.common import (
    add_remote_arguments,
    check,
    open_llm,
    open_remote,
    text_options,
)
from penstock.cli.remote import AnswerDelta, Message
from penstock.cli.terminal import join_quoted, notice, printing, read_lines
from penstock.config.cli import add_engine_arguments, add_sampling_arguments, override
from penstock.protocol.errors import ConfigError, InputError, PenstockError
from penstock.protocol.sampling import OutputKind, SamplingParams

if TYPE_CHECKING:
    from penstock.llm import LLM

DEFAULT_MAX_TOKENS = 512
COMMANDS_HELP = """\
/reset         forget the conversation
/system TEXT   set the system prompt and start anew; without TEXT, remove it
/image FILE    send an image or a video (a file or a URL) with the next message
/save FILE     write the conversation: messages to a .json file, else Markdown
/help          show this
/exit          leave; Ctrl-D does too
Ctrl-C stops an answer."""

# Most models give gibberish at a temperature of 1.
DEFAULT_SAMPLING = {"temperature": 0.7, "top_p": 0.95}

Answers = Callable[[list[Message]], Generator[AnswerDelta, None, None]]
"""Streams the answer to a conversation. Closing the iterator early aborts it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system-prompt", metavar="TEXT", help="System prompt.")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="Send an image or a video, a file or a URL, with the first message. Repeatable.",
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Answer one message and leave.")
    parser.add_argument(
        "--plain", action="store_true", help="Do not render Markdown (penstock[chat])."
    )
    add_remote_arguments(parser, None)
    add_engine_arguments(parser)
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS, others=DEFAULT_SAMPLING)


def run(args: argparse.Namespace) -> int:
    options, sampling = text_options(args)
    if sampling.get("n", 1) != 1:
        raise InputError(f"chat gives one answer at a time, got n={sampling['n']}", "n")
    if args.url is not None:
        if options:
            raise ConfigError(f"{min(options)} is the server's matter: drop it, or drop --url")
        return talk(args, open_remote(args, sampling).chat)
    with open_llm(options) as llm:
        return talk(args, local_answers(llm, sampling))


def local_answers(llm: LLM, sampling: Mapping[str, Any]) -> Answers:
    """Answers of a model in this process, with its own sampling parameters if it names any."""
    own = llm.get_default_sampling_params()
    if own == SamplingParams():
        own = override(own, DEFAULT_SAMPLING)
    params = override(own, {**sampling, "output_kind": OutputKind.DELTA})

    def answers(messages: list[Message]) -> Generator[AnswerDelta, None, None]:
        with contextlib.closing(llm.stream(messages, params)) as outputs:
            for output in outputs:
                (completion,) = check(output).outputs
                yield AnswerDelta(completion.text, len(completion.token_ids))

    return answers


def talk(args: argparse.Namespace, answers: Answers) -> int:
    """Run the conversation that the arguments ask for."""
    from penstock.loading.fetch import cache_folder  # not for --help

    interactive = sys.stdin.isatty() and args.quick is None
    renders = sys.stdout.isatty() and not args.plain
    chat = Chat(answers, args.system_prompt, interactive=interactive, renders=renders)
    chat.attached = [attachment(source) for source in args.image]
    if args.quick is not None:
        chat.answer(args.quick)
    else:
        history = cache_folder(None).parent / "chat_history"
        chat.loop(join_quoted(read_lines(history) if interactive else sys.stdin))
    return 0


class Chat:
    """Owns the messages of the conversation and handles lines of input."""

    def __init__(
        self,
        answers: Answers,
        system_prompt: str | None = None,
        *,
        interactive: bool = False,
        renders: bool = False,
    ) -> None:
        self._answers = answers
        self._interactive = interactive
        self._renders = renders
        self.attached: list[dict[str, Any]] = []  # sent before the next message's text
        self.start(system_prompt)

    def start(self, system_prompt: str | None) -> None:
        """Start a new conversation."""
        self.system_prompt = system_prompt
        self.messages: list[Message] = []
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})

    def loop(self, lines: Iterable[str]) -> None:
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
        elif command == "/save":
            self.save(argument.strip())
        elif command == "/help":
            notice(COMMANDS_HELP)
        else:
            raise InputError(f"unknown command {command}; /help lists those there are")

    def save(self, name: str) -> None:
        """Write the conversation to a file."""
        if not name:
            raise InputError("/save needs the name of a file")
        if name.endswith(".json"):
            text = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        else:
            turns = [f"## {item['role']}\n\n{_text_of(item)}\n" for item in self.messages]
            text = "\n".join(turns)
        try:
            Path(name).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {name}: {error.strerror}") from error
        notice(f"The conversation is in {name}.")

    def answer(self, text: str) -> None:
        """Stream the model's answer and add both turns to the conversation.

        An answer that Ctrl-C stopped is kept so far. A failed answer changes nothing.
        """
        content = [*self.attached, {"type": "text", "text": text}] if self.attached else text
        conversation = [*self.messages, {"role": "user", "content": content}]
        pieces: list[str] = []
        num_tokens = 0
        start = time.perf_counter()
        with (
            _Interrupt() as interrupt,
            contextlib.closing(self._answers(conversation)) as answers,
            printing(self._renders) as show,
        ):
            for piece in answers:
                num_tokens += piece.num_tokens
                if piece.is_reasoning:
                    print(piece.text, end="", file=sys.stderr, flush=True)
                elif piece.text:
                    pieces.append(piece.text)
                    show(piece.text)
                if interrupt.requested:
                    break
        elapsed = time.perf_counter() - start
        notice(f"[{num_tokens} tokens, {num_tokens / elapsed:.1f} tokens/s]")
        self.messages = [*conversation, {"role": "assistant", "content": "".join(pieces)}]
        self.attached = []


def _text_of(message: Message) -> str:
    """A message's text, with images and videos by their kind."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", f"({part['type']})")) for part in content)


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
