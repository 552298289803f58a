"""What the chat on the page at / shows and keeps, in a real browser."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

from accessibility import grave_faults
from page_actions import answer_with, message_field, say, sent_bodies, wait_for_answer
from playwright.sync_api import Locator, Page, Route, expect
from server_process import ServerProcess

OpenPage = Callable[..., Page]
READY = '#status[data-state="ready"]'
PHONE = {"width": 360, "height": 740}
TOOLS = [{"name": "get_weather", "parameters": {"type": "object"}}]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
PICTURE: Any = {"name": "dot.png", "mimeType": "image/png", "buffer": PIXEL}
RICH = r"""Use `map`, see [docs](https://example.com/a):

| Model | Size |
|:--|--:|
| tiny | 1 |

So $e^{i\pi}$ costs $5 and $10:

$$\frac{1}{2}$$

\[ \frac{3}{4} \]

```python
x = 1

if x < 2:
    y = '<b>'
```
"""
HOSTILE = """<script>document.title = "owned"</script><img src=x onerror="document.title = 'owned'">
[a](javascript:document.title='owned') ![b](https://example.com/b.png) <https://example.com>
$\\href{javascript:alert(1)}{x}$ and $\\unknown{x}$ é✓
"""


def body(page: Page) -> Locator:
    return page.locator(".message.assistant .body").last


def set_field(page: Page, name: str, value: Any) -> None:
    page.locator(f"#options [name={name}]").fill(
        value if isinstance(value, str) else json.dumps(value)
    )


# -- what an answer becomes


def test_markdown_becomes_tables_maths_and_code_in_colours(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(scripted_server)
    answer_with(page, RICH)
    say(page, "Show me")
    wait_for_answer(page)
    expect(body(page).locator("td")).to_have_text(["tiny", "1"])
    expect(body(page).locator("td").last).to_have_class("right")
    expect(body(page).locator(".katex")).to_have_count(3)
    expect(body(page).locator(".maths.display .mfrac")).to_have_count(2)
    expect(body(page)).to_contain_text("costs $5 and $10:")
    code = body(page).locator("pre code")
    expect(code).to_have_text("x = 1\n\nif x < 2:\n    y = '<b>'")
    expect(code.locator(".hljs-keyword")).to_have_text("if")
    expect(body(page).locator(".code .bar")).to_contain_text("python")
    link = body(page).get_by_role("link", name="docs")
    expect(link).to_have_attribute("rel", "noopener noreferrer")


def test_an_answer_cannot_run_code_or_load_anything(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(scripted_server)  # which complains about requests to anyone else
    answer_with(page, HOSTILE)
    say(page, "Harm me")
    wait_for_answer(page)
    expect(body(page)).to_contain_text('<script>document.title = "owned"</script><img src=x')
    expect(body(page)).to_contain_text("\\unknown{x} é✓")
    expect(body(page).locator("script, img, [onerror], [style*=url]")).to_have_count(0)
    links = body(page).get_by_role("link").evaluate_all("all => all.map((link) => link.href)")
    assert set(links) == {"https://example.com/b.png", "https://example.com/"}
    assert "owned" not in page.title()


def test_code_can_be_copied_where_there_is_no_clipboard_api(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    """As on plain http from another machine."""
    page = open_page(scripted_server)
    page.evaluate("delete Navigator.prototype.clipboard")
    answer_with(page, RICH)
    say(page, "Show me")
    wait_for_answer(page)
    page.get_by_role("button", name="Copy code").click()
    expect(page.locator(".code .bar button")).to_have_text("Copied")
    message_field(page).press("Control+V")
    expect(message_field(page)).to_have_value("x = 1\n\nif x < 2:\n    y = '<b>'")


def test_reasoning_is_folded_above_the_answer(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(scripted_server)
    say(page, "[[<think>It is *easy*.</think>Paris.]]")
    assert wait_for_answer(page) == "Paris."
    reasoning = page.locator(".reasoning")
    expect(reasoning.locator("em")).to_be_hidden()
    reasoning.get_by_text("Reasoning").click()
    expect(reasoning.locator("em")).to_have_text("easy")
    following = "node => node.nextElementSibling.className"
    assert reasoning.evaluate(following) == "body"


def test_tool_calls_are_shown_and_their_results_sent(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(scripted_server)
    bodies = sent_bodies(page)
    set_field(page, "tools", TOOLS)
    say(page, f"[[{CALL}]]")
    result = page.get_by_label("Result of get_weather")
    expect(page.locator(".call code").last).to_have_text('{\n  "city": "Paris"\n}')
    expect(page.locator(".pace")).to_contain_text("calls tools")
    result.fill("[[18 degrees]]")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".message.assistant")).to_have_count(2)
    assert wait_for_answer(page) == "18 degrees"
    asked, called, told = bodies[1]["messages"]
    assert bodies[0]["tools"] == [{"type": "function", "function": TOOLS[0]}]
    assert asked["role"] == "user"
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    call_id = called["tool_calls"][0]["id"]
    assert told == {"role": "tool", "content": "[[18 degrees]]", "tool_call_id": call_id}


def test_an_answer_follows_a_schema(scripted_server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(scripted_server)
    set_field(page, "schema", "{")
    say(page, "Hello")
    schema = page.locator("#options [name=schema]")
    expect(schema).to_be_focused()
    expect(page.locator(".message")).to_have_count(0)
    set_field(page, "schema", SCHEMA)
    say(page, '[[{"city": "Paris"}]]')
    wait_for_answer(page)
    expect(body(page).locator("pre code")).to_have_text('{"city": "Paris"}')
    expect(body(page).locator(".hljs-attr")).to_have_text('"city"')


# -- branches


def test_an_edited_message_and_another_answer_are_branches(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(scripted_server)
    bodies = sent_bodies(page)
    say(page, "[[one]]")
    wait_for_answer(page)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("[[two]]")
    page.get_by_label("Edit message").press("Enter")
    expect(body(page)).to_have_text("two")
    assert wait_for_answer(page) == "two"
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("group", name="Version 2 of 2")).to_have_count(2)
    wait_for_answer(page)
    assert [len(sent["messages"]) for sent in bodies] == [1, 1, 1]
    page.locator(".message.user").get_by_role("button", name="Previous version").click()
    expect(body(page)).to_have_text("one")
    say(page, "[[three]]")
    assert wait_for_answer(page) == "three"
    contents = [message["content"] for message in bodies[-1]["messages"]]
    assert contents == ["[[one]]", "one", "[[three]]"]


# -- the list of conversations


def test_conversations_are_kept_exported_and_imported(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(scripted_server)
    titles = page.locator("#conversations .title")
    for text in ("[[one]]", "[[two]]"):
        say(page, text)
        wait_for_answer(page)
        page.get_by_role("button", name="New chat", exact=True).click()
    expect(titles).to_have_text(["[[two]]", "[[one]]"])
    page.reload()
    titles.nth(1).click()
    expect(body(page)).to_have_text("one")
    expect(titles.nth(1)).to_have_attribute("aria-current", "true")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export").click()
    path = saved.value.path()

    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete [[one]]").click()
    expect(titles).to_have_text(["[[two]]"])
    expect(page.locator(".message")).to_have_count(0)
    page.locator("#import-file").set_input_files(path)
    expect(page.locator("#history-note")).to_have_text("2 conversations imported.")
    expect(titles).to_have_text(["[[two]]", "[[one]]"])
    page.reload()
    expect(titles).to_have_text(["[[two]]", "[[one]]"])
    broken: Any = {"name": "x.json", "mimeType": "application/json", "buffer": b'{"a": 1}'}
    page.locator("#import-file").set_input_files(broken)
    expect(page.locator("#history-note")).to_have_text(
        "The file is not an export of conversations."
    )


# -- images


def takes_images(route: Route) -> None:
    models = route.fetch().json()
    assert [card["takes_images"] for card in models["data"]] == [False]
    models["data"][0]["takes_images"] = True
    route.fulfill(json=models)


def drop(page: Page) -> None:
    """Drop a picture on the chat, as a person does from a folder."""
    files = """data => {
      const transfer = new DataTransfer();
      const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
      transfer.items.add(new File([bytes], "dot.png", { type: "image/png" }));
      return transfer;
    }"""
    transfer = page.evaluate_handle(files, base64.b64encode(PIXEL).decode())
    page.dispatch_event("#chat", "drop", {"dataTransfer": transfer})


def test_images_are_attached_dropped_and_sent(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(scripted_server)
    expect(page.locator(READY)).to_be_visible()
    expect(page.get_by_role("button", name="Attach images")).to_be_hidden()
    drop(page)
    expect(page.get_by_text("This model takes no images.")).to_be_visible()

    page.route("**/v1/models", takes_images)
    page.reload()
    expect(page.get_by_role("button", name="Attach images")).to_be_visible()
    page.locator("#image-file").set_input_files([PICTURE, PICTURE])
    previews = page.locator("#attachments img")
    expect(previews).to_have_count(2)
    drop(page)
    expect(previews).to_have_count(3)
    page.get_by_role("button", name="Remove image 2").click()
    expect(previews).to_have_count(2)
    assert previews.first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 1
    bodies = sent_bodies(page)
    answer_with(page, "A dot.")
    say(page, "What is this?")
    wait_for_answer(page)
    expect(previews).to_have_count(0)
    expect(page.locator(".message.user img")).to_have_count(2)
    url = f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    (message,) = bodies[0]["messages"]
    assert message["content"] == [image, image, {"type": "text", "text": "What is this?"}]


# -- the page around it


def test_the_theme_is_chosen_and_kept(scripted_server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(scripted_server, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    button = page.get_by_role("button", name="Theme")
    for name, is_light in (("light", True), ("dark", False)):
        button.click()
        expect(button).to_have_text(f"Theme: {name}")
        assert (page.evaluate(ground) == light) == is_light
    page.reload()
    expect(button).to_have_text("Theme: dark")
    assert page.evaluate(ground) != light


def test_shortcuts_are_listed_and_work(scripted_server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(scripted_server)
    message_field(page).press("?")
    expect(message_field(page)).to_have_value("?")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.locator("#scroller").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_contain_text(
        "Begin a new chat"
    )
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+s")
    expect(page.locator("#charts")).to_be_visible()
    page.keyboard.press("/")
    expect(message_field(page)).to_be_focused()


def test_parameters_are_explained_by_the_apis_schema(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(scripted_server)
    schemas = scripted_server.get("/openapi.json").json()["components"]["schemas"]
    known = schemas["ChatCompletionRequest"]["properties"]
    places = page.locator("[data-explains]")
    expect(places.first).not_to_be_empty()
    names = places.evaluate_all("all => all.map((place) => place.dataset.explains)")
    assert len(names) > 10
    expect(places).to_have_text([known[name]["description"] for name in names])


def test_axe_finds_nothing_serious(scripted_server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(scripted_server, color_scheme="light")
    expect(page.locator(READY)).to_be_visible()
    say(page, f"[[<think>So.</think>{RICH}]]")
    wait_for_answer(page)
    set_field(page, "tools", TOOLS)
    say(page, f"[[{CALL}]]")
    expect(page.get_by_label("Result of get_weather")).to_be_visible()
    faults = grave_faults(page)
    page.emulate_media(color_scheme="dark")
    faults += grave_faults(page, "header", "#history", "#messages")
    page.get_by_role("button", name="Keyboard shortcuts").click()
    faults += grave_faults(page, "dialog[open]")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Server").click()
    faults += grave_faults(page, "#server")
    page.goto(f"{scripted_server.base_url}/docs#post-v1-chat-completions")
    expect(page.locator("#post-v1-chat-completions")).to_have_attribute("open", "")
    faults += grave_faults(page, "header", "#contents", "#post-v1-chat-completions .try")
    assert faults == []


def test_axe_finds_nothing_serious_on_a_phone(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(scripted_server, viewport=PHONE, has_touch=True, is_mobile=True)
    expect(page.locator(READY)).to_be_visible()
    say(page, f"[[<think>So.</think>{RICH}]]")
    wait_for_answer(page)
    faults = grave_faults(page)
    for view in ("Chats", "Server", "Settings"):
        page.get_by_role("button", name=view, exact=True).tap()
        faults += grave_faults(page)
    assert faults == []


def test_an_answer_is_no_wider_than_a_phone(
    scripted_server: ServerProcess, open_page: OpenPage
) -> None:
    page = open_page(scripted_server, viewport=PHONE, has_touch=True, is_mobile=True)
    long = "word" * 40
    wide_table = f"| {' | '.join(['column'] * 12)} |\n|{'--|' * 12}\n| {' | '.join(['x'] * 12)} |"
    answer_with(
        page, f"{RICH}\n{long}\n\n{wide_table}\n\n`{long}`\n\n```\n{long}\n```\n\n$${long}$$"
    )
    say(page, long)
    wait_for_answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.locator("#scroller").evaluate("box => box.scrollWidth - box.clientWidth") == 0
    expect(page.locator(".table").last).to_have_attribute("tabindex", "0")
    assert re.search(r"\d+ tokens", page.locator(".pace").inner_text())
