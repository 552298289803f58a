"""A conversation: what is remembered, what the commands do, and what Ctrl-C stops."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from penstock.cli.attachments import attachment
from penstock.cli.chat import Chat
from penstock.cli.remote import AnswerDelta, Message
from penstock.cli.terminal import join_quoted
from penstock.protocol.errors import InputError, RequestFault


class Script:
    """A model that gives prepared answers, piece by piece, and records what it was asked."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[list[Message]] = []
        self.num_yielded = 0
        self.closed = False

    def __call__(self, prompt: list[Message], /) -> Generator[AnswerDelta, None, None]:
        self.asked.append(prompt)
        try:
            for piece in self.answers.pop(0):
                if piece == "^C":
                    os.kill(os.getpid(), signal.SIGINT)
                    continue
                self.num_yielded += 1
                yield AnswerDelta(piece, 1)
        finally:
            self.closed = True


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def talk(script: Script, *lines: str, system_prompt: str | None = None) -> Chat:
    chat = Chat(script, system_prompt, interactive=True)
    chat.loop(iter(lines))
    return chat


def test_every_turn_sees_those_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(["Hel", "lo."], ["Fine."])
    talk(script, "Hi", "  How are you? \n", system_prompt="Be brief.")
    assert script.asked == [
        [system("Be brief."), user("Hi")],
        [system("Be brief."), user("Hi"), assistant("Hello."), user("How are you?")],
    ]
    captured = capsys.readouterr()
    assert captured.out == "Hello.\nFine.\n"
    assert "[2 tokens, " in captured.err
    assert "tokens/s]" in captured.err


def test_blank_lines_ask_nothing() -> None:
    script = Script()
    talk(script, "", "   \n")
    assert script.asked == []


def test_reset_forgets_all_but_the_system_prompt() -> None:
    script = Script(["a"], ["b"])
    talk(script, "one", "/reset", "two", system_prompt="S")
    assert script.asked[1] == [system("S"), user("two")]


def test_system_sets_the_prompt_and_starts_anew() -> None:
    script = Script(["a"], ["b"], ["c"])
    talk(script, "one", "/system Speak  French.", "two", "/system", "three", system_prompt="S")
    assert script.asked[1] == [system("Speak  French."), user("two")]
    assert script.asked[2] == [user("three")]


@pytest.mark.parametrize("command", ["/exit", "/quit"])
def test_exit_leaves(command: str) -> None:
    script = Script()
    talk(script, command, "never asked")
    assert script.asked == []


def test_help_and_unknown_commands_talk_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk(Script(), "/help", "/frobnicate now")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "/system TEXT" in captured.err
    assert "unknown command /frobnicate; /help lists those there are" in captured.err


def test_ctrl_c_stops_the_answer_and_not_the_conversation() -> None:
    script = Script(["one ", "^C", "two ", "three "], ["fine"])
    before = signal.getsignal(signal.SIGINT)
    chat = talk(script, "count", "and now?")
    assert script.num_yielded == 3  # "three " was never asked for
    assert script.closed
    assert chat.messages == [
        user("count"),
        assistant("one two "),
        user("and now?"),
        assistant("fine"),
    ]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_breaks_out_of_an_engine_that_hangs() -> None:
    script = Script(["^C", "^C", "never"])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        talk(script, "count")
    assert signal.getsignal(signal.SIGINT) is before


class Refusing:
    """A model that refuses the first question and answers the others."""

    def __init__(self, error: Exception) -> None:
        self.asked: list[list[Message]] = []
        self.error = error

    def __call__(self, prompt: list[Message], /) -> Generator[AnswerDelta, None, None]:
        self.asked.append(prompt)
        if len(self.asked) > 1:
            yield AnswerDelta("fine", 1)
        else:
            yield AnswerDelta("half", 1)
            raise self.error


@pytest.mark.parametrize("error", [InputError("prompt too long", "prompt"), RequestFault("bad")])
def test_a_failed_turn_leaves_no_trace_and_the_conversation_goes_on(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Refusing(error)
    chat = Chat(model, interactive=True)
    chat.loop(iter(["first", "second"]))
    assert model.asked[1] == [user("second")]
    assert "penstock: error: " in capsys.readouterr().err


def test_a_failed_turn_ends_a_conversation_that_nobody_watches() -> None:
    model = Refusing(RequestFault("out of luck"))
    with pytest.raises(RequestFault, match="out of luck"):
        Chat(model, interactive=False).loop(iter(["first", "second"]))
    assert len(model.asked) == 1


def test_a_conversation_is_saved_as_messages_or_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, page = tmp_path / "chat.json", tmp_path / "chat.md"
    talk(Script(["Hello."]), "Hi", f"/save {data}", f"/save {page}", "/save", "/save /no/where")
    assert json.loads(data.read_text()) == [user("Hi"), assistant("Hello.")]
    assert page.read_text() == "## user\n\nHi\n\n## assistant\n\nHello.\n"
    told = capsys.readouterr().err
    assert "/save needs the name of a file" in told
    assert "cannot write /no/where: No such file or directory" in told


@pytest.mark.parametrize(
    ("lines", "joined"),
    [
        (["a", "b"], ["a", "b"]),
        (['"""one', "two", 'three"""', "four"], ["one\ntwo\nthree", "four"]),
        (['"""', "one", '"""'], ["\none\n"]),
        (['"""all of it"""'], ["all of it"]),
        (['"""open', "end"], ["open\nend"]),
    ],
)
def test_quotes_join_lines(lines: list[str], joined: list[str]) -> None:
    assert list(join_quoted(lines)) == joined


def test_answers_are_rendered_as_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    chat = Chat(Script(["- on", "e\n- two"]), renders=True)
    chat.answer("list")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert list(filter(None, lines)) == ["\u2022 one", "\u2022 two"]
    assert chat.messages[-1] == assistant("- one\n- two")


def test_attachments_go_with_the_next_message(tmp_path: Path) -> None:
    for name in ("a.png", "b.mp4"):
        (tmp_path / name).write_bytes(b"abc")
    script = Script(["one"], ["two"])
    chat = talk(
        script,
        f"/image {tmp_path}/a.png",
        f"/image {tmp_path}/b.mp4",
        "/image /none",
        "what",
        "and",
    )
    content = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,YWJj"}},
        {"type": "text", "text": "what"},
    ]
    assert script.asked[0] == [{"role": "user", "content": content}]
    assert chat.messages[2:] == [user("and"), assistant("two")]
    assert attachment("https://x/a.webm?b=c")["type"] == "video_url"
