"""Images and videos over HTTP: transformers' tokens, and errors that name the part."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_media import Hostile, data_url, hostile_media, hostile_web, png, saved
from server_process import ServerProcess, events
from tiny_vision import Reference, make_vision_checkpoint, picture
from video_clips import video_file

from penstock.media.video import Sampling, decode_video

FLAGS = (
    "--dtype", "float32", "--max-model-len", "1024", "--num-gpu-blocks-override", "200",
    "--cpu-threads", "1", "--limit-mm-per-prompt", '{"image": 2, "video": 1}',
    "--allowed-media-networks", "127.0.0.1/32", "--media-fetch-timeout", "60",
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
    return data_url(saved(image, kind))


def message(*parts: str) -> dict[str, Any]:
    """Texts, and images and videos as URLs."""

    def part_of(text: str) -> dict[str, Any]:
        if not text.startswith(("data:", "http", "file", "ftp")):
            return {"type": "text", "text": text}
        kind = "video" if text.startswith("data:video") else "image"
        return {"type": f"{kind}_url", f"{kind}_url": {"url": text}}

    return {"role": "user", "content": [part_of(part) for part in parts]}


def test_tokens_equal_transformers_through_a_kill(folder: Path, server: ServerProcess) -> None:
    """Two images, a video, and text."""
    images = [picture(100, 60), picture(40, 90, 1)]
    file = video_file(24)
    found = decode_video(file, Sampling(num_frames=5), False, lambda frame, _: frame)
    facts = {"fps": found.fps, "frames_indices": found.numbers, "total_num_frames": 24}
    reference = Reference(folder, "qwen2_5_vl")
    place, video = reference.variant.image, reference.variant.video
    prompt_ids, token_ids, _ = reference.generate_scored(
        f"<|user|>hi {place} there {place} and {video}<|assistant|>",
        images,
        24,
        (np.stack(found.frames), facts),
    )
    first, second = map(encoded, images)
    body = {
        "model": str(folder),
        "messages": [
            message("hi ", first, " there ", second, " and ", data_url(file, "video/mp4"))
        ],
        "media_io_kwargs": {"video": {"num_frames": 5}},
        "return_token_ids": True,
        **ASKED,
    }
    answer = server.post("/v1/chat/completions", body).json()
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(prompt_ids)
    config = reference.model.config
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "image_tokens": prompt_ids.count(config.image_token_id),
        "video_tokens": prompt_ids.count(config.video_token_id),
    }
    assert answer["choices"][0]["token_ids"] == token_ids
    again = server.post("/v1/chat/completions", body).json()
    block = 16
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (len(prompt_ids) - 1) // block * block
    os.kill(server.engine_pid, signal.SIGKILL)
    again = server.post("/v1/chat/completions", body).json()
    assert again["choices"][0]["token_ids"] == token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "smolvlm"])
def test_streams_with_images_go_on_after_a_kill(name: str, tmp_path: Path) -> None:
    """Bidirectional spans, features for early layers, and tiles are computed again."""
    folder = make_vision_checkpoint(tmp_path, name)
    reference = Reference(folder, name)
    image = picture(100, 60)
    prompt = f"<|user|>{reference.variant.image}Say<|assistant|>"
    _, expected = reference.generate(prompt, [image], 200)
    body = {
        "model": str(folder), "messages": [message(encoded(image), "Say")], "temperature": 0,
        "max_tokens": 200, "ignore_eos": True, "return_token_ids": True, "stream": True,
    }  # fmt: skip
    with (
        ServerProcess(str(folder), *FLAGS) as server,
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        token_ids: list[int] = []
        for line in answer.iter_lines():
            event = line.removeprefix("data: ")
            if not event or event == "[DONE]":
                continue
            found = json.loads(event)["choices"][0].get("token_ids") or []
            if found and not token_ids:
                os.kill(server.engine_pid, signal.SIGKILL)
            token_ids += found
    assert token_ids == expected


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png,abc", "data URL"),
        (encoded(picture(64, 64))[:400], "broken|not an image|base64"),
        (data_url(png(100_000, 100_000)), "pixels"),
        ("file:///etc/passwd", "allowed-local-media-path"),
        ("http://169.254.169.254/latest", "no public address"),
        (encoded(picture(1, 900)), "processor cannot take"),
        (data_url(b"hello", "video/mp4"), "not a video"),
    ],
)
def test_a_bad_file_is_a_400_that_says_why(
    server: ServerProcess, folder: Path, url: str, says: str
) -> None:
    body = {"model": str(folder), "messages": [message("what", url)], **ASKED}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert re.search(says, answer.json()["error"]["message"]), answer.text


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_hostile_media_are_refused_beside_good_requests(
    server: ServerProcess, folder: Path, count: int
) -> None:
    asked = {"model": str(folder), **ASKED}
    good = {**asked, "messages": [message("Say", encoded(picture(60, 60)))]}

    def ask_well() -> str:
        answer = server.post("/v1/chat/completions", good)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def fault(case: Hostile) -> str:
        """What is wrong with the answer to a case, if anything."""
        part = {"type": f"{case.kind}_url", f"{case.kind}_url": {"url": case.url}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "what"}, part]}]
        answer = server.post("/v1/chat/completions", {**asked, "messages": messages})
        param = (answer.json().get("error") or {}).get("param") or ""
        right = 400 <= answer.status_code < 500 and param.startswith("messages[0].content[1]")
        return "" if right else f"{case.name}: {answer.status_code} {answer.text[:200]}"

    def stream_well() -> list[int]:
        token_ids = []
        for event in events(server.post(path, {**good, **streams}).text):
            if event != "[DONE]":
                token_ids += event["choices"][0].get("token_ids") or []
        return token_ids

    path, streams = "/v1/chat/completions", {"stream": True, "return_token_ids": True}
    expected = ask_well()
    streamed = stream_well()
    assert len(streamed) == ASKED["max_tokens"]
    with hostile_web() as web, ThreadPoolExecutor(8) as threads:
        faults = [threads.submit(fault, case) for case in hostile_media(count, web)]
        while not all(each.done() for each in faults):
            assert ask_well() == expected
            assert stream_well() == streamed
        assert [each.result() for each in faults if each.result()] == []
    assert ask_well() == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["same", "different", "fetched"])
def test_a_hundred_images_at_once_are_all_taken(
    server: ServerProcess, folder: Path, kind: str, web_image: str
) -> None:
    """The same one is processed once. None is refused because others come with it."""

    def ask(number: int) -> int:
        url = (
            web_image
            if kind == "fetched"
            else encoded(picture(80, 60, number if kind == "different" else 1000))
        )
        body = {"model": str(folder), "messages": [message("Say", url)], "max_tokens": 1}
        return int(server.post("/v1/chat/completions", body).status_code)

    before = media_lookups(server)
    with ThreadPoolExecutor(100) as threads:
        assert set(threads.map(ask, range(100))) == {200}
    queries, hits = (now - then for now, then in zip(media_lookups(server), before, strict=True))
    assert queries == 100
    assert hits == {"same": 99, "different": 0}.get(kind, hits)


def test_too_many_images_and_stray_placeholders(server: ServerProcess, folder: Path) -> None:
    image = encoded(picture(40, 40))
    many = {"model": str(folder), "messages": [message(image, image, image)], **ASKED}
    answer = server.post("/v1/chat/completions", many)
    assert answer.status_code == 400
    assert "at most 2" in answer.json()["error"]["message"]
    video = data_url(b"", "video/mp4")
    answer = server.post("/v1/chat/completions", {**many, "messages": [message(video, video)]})
    assert answer.status_code == 400
    assert "at most 1 items of type video" in answer.json()["error"]["message"]
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
    counted, details = usage["prompt_tokens_details"], answer["usage"]["input_tokens_details"]
    assert counted["image_tokens"] > 0
    assert {key: details[key] for key in ("image_tokens", "video_tokens")} == {
        key: counted[key] for key in ("image_tokens", "video_tokens")
    }

    source = {"type": "base64", "media_type": "image/png", "data": data_url.partition(",")[2]}
    for each in (source, {"type": "url", "url": web_image}):
        blocks = [{"type": "image", "source": each}, {"type": "text", "text": "Say"}]
        body = {"model": model, "messages": [{"role": "user", "content": blocks}]}
        answer = server.post("/v1/messages", {**body, **ASKED}).json()
        assert answer["content"][0]["text"] == expected
        count = server.post("/v1/messages/count_tokens", body).json()
        assert count["input_tokens"] == usage["prompt_tokens"]


def test_a_part_of_another_type_is_refused_by_its_place(
    server: ServerProcess, folder: Path
) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}}
    body = {"model": str(folder), "messages": [{"role": "user", "content": [sound]}]}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "messages[0].content[0]"
    assert "'input_audio', which is not supported: send parts of type 'text'" in error["message"]


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


def test_the_list_of_models_says_that_images_are_taken(server: ServerProcess) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert card["takes_images"] is True


def media_lookups(server: ServerProcess) -> tuple[float, float]:
    """In the cache of processed media: all, and those that found an item."""
    text = server.get("/metrics").text
    found = re.findall(r"mm_cache_(queries|hits)_total\{.*\} (\S+)", text)
    values = {name: float(value) for name, value in found}
    return values["queries"], values["hits"]


def test_lookups_in_the_cache_of_processed_media_are_counted(server: ServerProcess) -> None:
    queries, hits = media_lookups(server)
    body = {"messages": [message("Say", encoded(picture(31, 77)))], "max_tokens": 1}
    for _ in range(2):
        assert server.post("/v1/chat/completions", body).status_code == 200
    assert media_lookups(server) == (queries + 2, hits + 1)
