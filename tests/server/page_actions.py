"""The server's pages in a real browser, and what a person does on them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright
from server_process import ServerProcess

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 120_000  # for a busy machine; what is awaited takes a second or two


@contextlib.contextmanager
def a_browser() -> Iterator[Browser]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium, or put chromium on the PATH")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield launched
        launched.close()


@contextlib.contextmanager
def pages_of(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages; at the end none may have complained or asked anyone but its server."""
    pages: list[Page] = []
    complaints: list[str] = []

    def open_at(server: ServerProcess, path: str = "", **options: Any) -> Page:
        page = browser.new_context(**options).new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if is_bad(said) else None)
        page.on(
            "request",
            lambda asked: (
                None
                if asked.url.startswith(server.base_url)
                else complaints.append(f"asked {asked.url}")
            ),
        )
        page.goto(server.base_url + path)
        pages.append(page)
        return page

    yield open_at
    for page in pages:
        page.context.close()
    assert complaints == []


def is_bad(said: Any) -> bool:
    # The browser itself reports every status from 400 on; tests that cause one look at the page.
    return said.type in ("error", "warning") and "Failed to load resource" not in said.text


def say(page: Page, text: str) -> None:
    message_field(page).fill(text)
    message_field(page).press("Enter")


def message_field(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def wait_for_answer(page: Page) -> str:
    """The whole text of the last answer, once it has ended."""
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    return page.locator(".message.assistant .body").last.inner_text()


def dismiss_dialog(page: Page) -> None:
    """Close the dialog that asks for the key, without one."""
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


def set_options(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.locator(f"#options [name={name}]").fill(value)


def sent_bodies(page: Page) -> list[dict[str, Any]]:
    """What the page sends as chat requests from now on."""
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda asked: (
            bodies.append(json.loads(asked.post_data or ""))
            if asked.url.endswith("/v1/chat/completions")
            else None
        ),
    )
    return bodies


def give_keys(page: Page, wrong: str, right: str) -> None:
    """Answer the dialog that asks for a key."""
    dialog = page.get_by_role("dialog")
    page.get_by_label("Key", exact=True).fill(wrong)
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("API keys")
    page.get_by_label("Key", exact=True).fill(right)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()


def answer_with(page: Page, text: str) -> None:
    """Have every chat request answered with `text`, cut into many chunks."""

    def fulfill(route: Route) -> None:
        chunks = [
            {"choices": [{"delta": {"content": text[i : i + 3]}}]} for i in range(0, len(text), 3)
        ]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        route.fulfill(content_type="text/event-stream", body="".join(lines))

    page.route("**/v1/chat/completions", fulfill)
