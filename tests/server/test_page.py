"""The pages at / and /docs, in a real browser, against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page_actions import (
    dismiss_dialog,
    give_keys,
    message_field,
    say,
    sent_bodies,
    set_options,
    wait_for_answer,
)
from playwright.sync_api import Page, expect
from server_process import DUMMY, ServerProcess
from waiting import eventually

from penstock.server.playground import load_files

LONG_STORY = "Tell me a very long story about a river."
PHONE = {"width": 360, "height": 740}
READY = '#status[data-state="ready"]'


@pytest.fixture(scope="module")
def locked_server(tiny_model: Path) -> Iterator[ServerProcess]:
    """A tiny model behind a key."""
    with ServerProcess(str(tiny_model), *DUMMY, "--api-key", "open-sesame") as process:
        yield process


# -- the chat


def test_an_answer_streams_in_and_the_conversation_goes_on(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server)
    bodies = sent_bodies(page)
    set_options(page, temperature="0", max_tokens="24", top_k="5", seed="7", system="Be brief.")
    with server.engine_stopped():
        say(page, "What is the capital of France?")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
    first = wait_for_answer(page)
    foot = page.locator(".message.assistant .pace").last
    expect(foot).to_have_text(
        re.compile(r"^\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ s( · cut at the limit)?$")
    )
    say(page, "And of Italy?")
    second = wait_for_answer(page)

    assert bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    asked = {name: bodies[0][name] for name in ("temperature", "top_p", "top_k", "max_tokens")}
    assert asked == {"temperature": 0, "top_p": 0.95, "top_k": 5, "max_tokens": 24}
    assert (bodies[0]["seed"], bodies[0]["stream"]) == (7, True)
    *_, answer, question = bodies[1]["messages"]
    assert answer["role"] == "assistant"
    assert answer["content"].strip() == first.strip()
    assert question == {"role": "user", "content": "And of Italy?"}

    # The same requests over the API give the texts that the page shows.
    for body, text in zip(bodies, (first, second), strict=True):
        reply = server.post(
            "/v1/chat/completions", {**body, "stream": False, "stream_options": None}
        )
        assert reply.json()["choices"][0]["message"]["content"].strip() == text.strip() != ""


def test_escape_stops_an_answer_and_keeps_what_has_come(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server)
    set_options(page, temperature="0", max_tokens="1500")
    say(page, LONG_STORY)
    expect(page.locator(".message.assistant .body p").first).not_to_be_empty()
    page.keyboard.press("Escape")
    text = wait_for_answer(page)
    assert text
    expect(page.locator(".pace")).to_contain_text("stopped")
    eventually(server.is_idle)
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.get_by_role("heading", name="Say something")).to_be_visible()
    expect(message_field(page)).to_be_focused()


def test_an_answer_can_be_had_again(server: ServerProcess, open_page: Callable[..., Page]) -> None:
    page = open_page(server)
    bodies = sent_bodies(page)
    set_options(page, temperature="0", max_tokens="8")
    page.get_by_role("button", name="Why is the sky blue?").click()
    first = wait_for_answer(page)
    page.get_by_role("button", name="Regenerate").click()
    assert wait_for_answer(page) == first
    assert bodies[0]["messages"] == bodies[1]["messages"]
    expect(page.locator(".message")).to_have_count(2)


def test_shift_enter_starts_a_line(server: ServerProcess, open_page: Callable[..., Page]) -> None:
    page = open_page(server)
    field = message_field(page)
    field.type("one")
    field.press("Shift+Enter")
    field.type("two")
    expect(field).to_have_value("one\ntwo")
    expect(page.locator(".message")).to_have_count(0)


def test_errors_are_shown_and_can_be_tried_again(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server)
    set_options(page, max_tokens="4", seed="1")
    page.locator("#options [name=top_k]").evaluate("field => field.removeAttribute('min')")
    set_options(page, top_k="-5")
    say(page, "Hello")
    fault = page.get_by_role("alert").filter(has_text="top_k")
    expect(fault).to_be_visible()
    set_options(page, top_k="")
    page.get_by_role("button", name="Try again").click()
    assert wait_for_answer(page)
    expect(fault).to_have_count(0)


def test_a_stream_that_breaks_is_an_error_on_the_page(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server)
    begun = 'data: {"choices": [{"delta": {"content": "Well"}}]}\n\n'
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=begun),
    )
    say(page, "Hello")
    expect(page.get_by_role("alert").filter(has_text="closed before")).to_be_visible()
    expect(page.locator(".message.assistant .body")).to_have_text("Well")


def test_what_was_not_answered_is_not_said_again(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server)
    bodies = sent_bodies(page)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=500, body="No."))
    say(page, "First")
    expect(page.get_by_role("alert").filter(has_text="No.")).to_be_visible()
    page.unroute("**/v1/chat/completions")
    set_options(page, max_tokens="2")
    say(page, "Second")
    wait_for_answer(page)
    assert bodies[1]["messages"] == [{"role": "user", "content": "Second"}]


def test_a_setting_that_is_not_valid_is_not_sent(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server)
    bodies = sent_bodies(page)
    set_options(page, temperature="9")
    say(page, "Hello")
    expect(page.locator("#options [name=temperature]")).to_be_focused()
    expect(message_field(page)).to_have_value("Hello")
    assert bodies == []


# -- the key


def test_a_key_is_asked_for_and_kept(
    locked_server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(locked_server)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    give_keys(page, "wrong", "open-sesame")
    expect(page.locator(READY)).to_be_visible()
    set_options(page, max_tokens="5")
    say(page, "Hello")
    wait_for_answer(page)
    expect(page.locator(".pace")).to_contain_text("token")
    page.reload()
    expect(page.locator(READY)).to_be_visible()
    expect(dialog).to_be_hidden()


def test_the_files_need_no_key_and_load_nothing_from_elsewhere(
    locked_server: ServerProcess,
) -> None:
    own = [f"/static/{name}" for name in load_files() if not name.startswith("vendor/")]
    with locked_server.client() as client:
        for path in ("/", "/docs", "/favicon.ico", *own):
            response = client.get(path)
            assert response.status_code == 200, path
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["cache-control"] == "no-cache"
            assert not re.search(r"(src|href)=\"https?:|url\(|@import", response.text), path
            again = client.get(path, headers={"If-None-Match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert client.get("/metrics").status_code == 401
        for path in ("/static/nothing.js", "/static/..%2f__init__.py", "/static/../__init__.py"):
            assert client.get(path).status_code in (401, 404)


def test_libraries_are_served_with_their_licences_and_kept_by_browsers(
    locked_server: ServerProcess,
) -> None:
    names = [name for name in load_files() if name.startswith("vendor/")]
    folders = {name.split("/")[1] for name in names}
    assert folders == {name.split("/")[1] for name in names if name.endswith("/LICENSE")}
    types = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}
    with locked_server.client() as client:
        for ending, kind in types.items():
            name = next(name for name in names if name.endswith(ending))
            response = client.get(f"/static/{name}")
            assert response.headers["content-type"].startswith(kind)
            assert "immutable" in response.headers["cache-control"]


# -- the documentation of the API


def test_the_docs_show_every_operation_and_the_schemas_it_uses(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server, "/docs")
    spec = server.get("/openapi.json").json()
    expected = [
        f"{method.upper()} {path}" for path, item in spec["paths"].items() for method in item
    ]
    contents = page.get_by_role("navigation", name="Contents").get_by_role("link")
    expect(contents).to_have_text(expected)
    expect(page.locator("#schemas details")).to_have_count(len(spec["components"]["schemas"]))

    page.get_by_role("link", name="POST /v1/chat/completions", exact=True).click()
    chat = page.locator("#post-v1-chat-completions")
    expect(chat).to_have_attribute("open", "")
    fields = spec["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    for name in fields:
        expect(chat.locator("dt", has_text=re.compile(f"^{name} ")).first).to_be_visible()
    messages = chat.locator(".fields > div", has_text=re.compile("^messages "))
    expect(messages).to_contain_text("list of ChatMessage required")
    expect(messages).to_contain_text("items: at least 1")
    messages.get_by_role("link", name="ChatMessage").click()
    schema = page.locator("#schema-ChatMessage")
    expect(schema).to_have_attribute("open", "")
    expect(schema.locator("dt", has_text="role")).to_be_visible()


def test_operations_can_be_tried_in_the_docs(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server, "/docs#post-tokenize")
    tokenize = page.locator("#post-tokenize")
    tokenize.get_by_label("Body").fill('{"prompt": "Hello"}')
    tokenize.get_by_role("button", name="Send").click()
    expect(tokenize.locator(".answer")).to_contain_text("200")
    expect(tokenize.locator(".answer")).to_contain_text('"count": 1')
    tokenize.get_by_label("Body").fill("{")
    tokenize.get_by_role("button", name="Send").click()
    expect(tokenize.locator(".answer")).to_contain_text("not valid JSON")

    page.get_by_role("link", name="POST /v1/chat/completions", exact=True).click()
    chat = page.locator("#post-v1-chat-completions")
    chat.get_by_role("button", name="Send").click()  # the example, which streams
    expect(chat.locator(".answer")).to_contain_text("chat.completion.chunk")
    expect(chat.locator(".answer")).to_contain_text("[DONE]")

    page.get_by_role("link", name="GET /v1/models/{").click()
    (model,) = (card["id"] for card in server.get("/v1/models").json()["data"])
    one = page.locator("details[open]", has_text="/v1/models/{").first
    one.get_by_role("textbox").fill(model)
    one.get_by_role("button", name="Send").click()
    expect(one.locator(".answer")).to_contain_text(f'"id": "{model}"')


def test_the_docs_ask_for_a_key_where_there_are_any(
    locked_server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(locked_server, "/docs", viewport=PHONE)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    expect(page.locator("#operations details")).to_have_count(0)
    give_keys(page, "wrong", "open-sesame")
    page.get_by_role("link", name="GET /version").click()
    version = page.locator("#get-version")
    version.get_by_role("button", name="Send").click()
    expect(version.locator(".answer")).to_contain_text('"version"')
    page.evaluate("for (const entry of document.querySelectorAll('details')) entry.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    with page.expect_download() as saved:
        page.get_by_role("link", name="openapi.json").click()
    assert json.loads(saved.value.path().read_text())["info"]["title"] == "Penstock"


# -- on a phone, from the keyboard


def test_a_phone_shows_one_part_at_a_time(
    locked_server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(locked_server, viewport=PHONE, has_touch=True, is_mobile=True)
    dismiss_dialog(page)
    views = {
        "Server": "#charts",
        "Settings": "#options",
        "Chats": "#conversations",
        "Chat": "#prompt",
    }
    for name, shown in views.items():
        page.get_by_role("button", name=name, exact=True).tap()
        for part in views.values():
            expect(page.locator(part)).to_be_visible(visible=part == shown)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"{name} is wider than the window"


def test_everything_can_be_reached_by_tab(
    locked_server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(locked_server)
    dismiss_dialog(page)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        on_body = page.evaluate("document.activeElement === document.body")
        assert on_body or outline != "none", reached
    assert {
        "prompt",
        "send",
        "key-button",
        "theme-button",
        "new-chat",
        "system",
        "seed",
        "tools",
    } <= reached
