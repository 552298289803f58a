"""Images over HTTP: the same tokens as transformers', and errors that name the part."""

from __future__ import annotations

import base64
import http.server
import io
import os
import re
import signal
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from tiny_vision import Reference, make_vision_checkpoint, picture

FLAGS = (
    "--dtype", "float32", "--max-model-len", "1024", "--num-gpu-blocks-override", "200",
    "--cpu-threads", "1", "--limit-mm-per-prompt", '{"image": 2}',
    "--allowed-media-networks", "127.0.0.1/32",
)  # fmt: skip
ASKED = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(folder), *FLAGS) as process:
        yield process


def encoded(image: Any, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return url_of(file.getvalue())


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def message(*parts: str) -> dict[str, Any]:
    """Texts, and images as data URLs."""
    content = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith(("data:", "http", "file", "ftp"))
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def test_tokens_equal_transformers_through_a_kill(folder: Path, server: ServerProcess) -> None:
    images = [picture(100, 60), picture(40, 90, 1)]
    reference = Reference(folder, "qwen2_5_vl")
    place = reference.variant.image
    prompt_ids, token_ids = reference.generate(
        f"<|user|>hi {place} there {place}<|assistant|>", images, 24
    )
    body = {
        "model": str(folder),
        "messages": [message("hi ", encoded(images[0]), " there ", encoded(images[1]))],
        "return_token_ids": True,
        **ASKED,
    }
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt_ids)
    assert answer["choices"][0]["token_ids"] == token_ids
    os.kill(server.engine_pid, signal.SIGKILL)
    again = server.post("/v1/chat/completions", body).json()
    assert again["choices"][0]["token_ids"] == token_ids


def bomb() -> bytes:
    """A PNG whose header says 100,000 x 100,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">2I5B", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"0" * 99))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,!!!!", "base64"),
        ("data:image/png,abc", "data URL"),
        ("ftp://example.com/a.png", "data URL"),
        (url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "not an image"),
        (url_of(b""), "not an image"),
        (encoded(picture(64, 64))[:400], "broken|not an image|base64"),
        (url_of(bomb()), "pixels"),
        ("file:///etc/passwd", "allowed-local-media-path"),
        ("http://169.254.169.254/latest", "no public address"),
        (encoded(picture(1, 900)), "processor cannot take"),
    ],
)
def test_a_bad_image_is_a_400_that_names_the_part(
    server: ServerProcess, folder: Path, url: str, says: str
) -> None:
    body = {"model": str(folder), "messages": [message("what", url)], **ASKED}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].startswith("messages[0].content[1]")
    assert re.search(says, error["message"]), error


def test_too_many_images_and_stray_placeholders(server: ServerProcess, folder: Path) -> None:
    image = encoded(picture(40, 40))
    many = {"model": str(folder), "messages": [message(image, image, image)], **ASKED}
    answer = server.post("/v1/chat/completions", many)
    assert answer.status_code == 400
    assert "at most 2" in answer.json()["error"]["message"]
    stray = {"model": str(folder), "messages": [message("<|image_pad|>", image)], **ASKED}
    answer = server.post("/v1/chat/completions", stray)
    assert answer.status_code == 400
    assert "one <|image_pad|>" in answer.json()["error"]["message"]


@pytest.fixture
def web_image() -> Iterator[str]:
    """The URL of an image."""
    file = io.BytesIO()
    picture(100, 60).save(file, "PNG")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(file.getvalue())

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_port}/a.png"
    web.shutdown()


def test_every_api_takes_images(server: ServerProcess, folder: Path, web_image: str) -> None:
    """The same image in each form gives the same answer, and is counted with its placeholders."""
    data_url = encoded(picture(100, 60))
    model = str(folder)
    chat = {"model": model, "messages": [message(data_url, "Say")], **ASKED}
    answer = server.post("/v1/chat/completions", chat).json()
    expected, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    by_url = {**chat, "messages": [message(web_image, "Say")]}
    answer = server.post("/v1/chat/completions", by_url).json()
    assert answer["choices"][0]["message"]["content"] == expected
    count = server.post("/tokenize", {"model": model, "messages": chat["messages"]}).json()
    assert count["count"] == usage["prompt_tokens"]

    part = {"type": "input_image", "image_url": web_image}
    item = {"role": "user", "content": [part, {"type": "input_text", "text": "Say"}]}
    asked = {"temperature": 0, "max_output_tokens": 24, "ignore_eos": True}
    answer = server.post("/v1/responses", {"model": model, "input": [item], **asked}).json()
    assert answer["output"][0]["content"][0]["text"] == expected
    assert answer["usage"]["input_tokens"] == usage["prompt_tokens"]

    source = {"type": "base64", "media_type": "image/png", "data": data_url.partition(",")[2]}
    for each in (source, {"type": "url", "url": web_image}):
        blocks = [{"type": "image", "source": each}, {"type": "text", "text": "Say"}]
        body = {"model": model, "messages": [{"role": "user", "content": blocks}]}
        answer = server.post("/v1/messages", {**body, **ASKED}).json()
        assert answer["content"][0]["text"] == expected
        count = server.post("/v1/messages/count_tokens", body).json()
        assert count["input_tokens"] == usage["prompt_tokens"]


def test_images_in_tool_results(server: ServerProcess, folder: Path) -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    image = {"type": "image", "source": {"type": "url", "url": encoded(picture(100, 60))}}
    bad = {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}
    for block, status in ((image, 200), (bad, 400)):
        result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
        messages = [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        body = {"model": str(folder), "messages": messages, **ASKED}
        answer = server.post("/v1/messages", body)
        assert answer.status_code == status, answer.text
        if status == 400:
            assert "messages[2].content[0].content[0].source" in answer.text
    output = [{"type": "input_image", "image_url": "file:///etc/passwd"}]
    items = [
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": output},
    ]
    answer = server.post("/v1/responses", {"model": str(folder), "input": items})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[1].output[0].image_url"
