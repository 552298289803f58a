"""Snippets of the docs' recipes run as they stand, with the server's own address."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import ServerProcess
from tiny_adapters import write_adapter

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(snippet: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> str:
    """What the snippet prints."""
    assert "http://localhost:8000" in snippet
    code = snippet.replace("http://localhost:8000", server.base_url)
    exec(compile(code, "snippet", "exec", dont_inherit=True), {"__name__": "snippet"})
    return capsys.readouterr().out


def test_structured_output_has_the_shape_asked_for(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    an_object, a_choice, a_pattern, _ = snippets("howto/structured-output.md")
    printed = run(an_object, server, capsys)
    assert re.match(r"(shipping|billing|technical) (True|False) ", printed)
    assert run(a_choice, server, capsys) in ("good\n", "bad\n")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}\n", run(a_pattern, server, capsys))


def test_the_first_requests_get_an_answer(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    for page, index in (("howto/ollama.md", 0), ("structured.md", 1)):
        assert run(snippets(page)[index], server, capsys).strip()


def test_the_first_answers_that_a_newcomer_gets_are_right(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default model knows little: the question is one that it answers on any processor."""
    page = "getting-started.md"
    assert "Tokyo" in run(snippets(page)[0], server, capsys)
    (body,) = re.findall(
        r"^curl .* -d '(.*?)'$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )
    reply = server.post("/v1/chat/completions", json.loads(body)).json()
    assert "Tokyo" in reply["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_structured_output_needs_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    exec(snippets("howto/structured-output.md")[3], {})
    assert "'population'" in capsys.readouterr().out


def test_adapters_of_a_folder_are_asked_beside_the_base(
    serve_tiny: Callable[..., ServerProcess], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "tickets", 0)
    flags = ("--max-loras", "8", "--max-cpu-loras", "64", "--served-model-name", "tiny")
    server = serve_tiny("--enable-lora", "--lora-resolver", str(tmp_path), *flags)
    (ask,) = snippets("howto/adapters.md")
    base, _, tickets = run(ask, server, capsys).partition("\ntickets: ")
    assert base.startswith("tiny: ")
    assert tickets
    assert base.removeprefix("tiny: ") != tickets.strip()
