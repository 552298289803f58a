"""The charts of the page at /, in a real browser, against a real server."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from page_actions import say, set_options
from playwright.sync_api import Locator, Page, Route, expect
from server_process import ServerProcess

LONG_STORY = "Tell me a very long story about a river."
READY = '#status[data-state="ready"]'


def show_view(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def chart(page: Page, title: str) -> Locator:
    return page.locator(".chart", has=page.get_by_role("heading", name=title, exact=True))


def test_charts_follow_the_server(server: ServerProcess, open_page: Callable[..., Page]) -> None:
    page = open_page(server)
    expect(page.locator(READY)).to_be_visible()
    set_options(page, temperature="0", max_tokens="1500")
    say(page, LONG_STORY)
    expect(page.locator("#live")).to_have_text(
        re.compile(r"^1 running · 0 waiting · [\d.]+ tokens/s$")
    )
    show_view(page, "Server")
    expect(page.locator(".chart:visible")).to_have_count(8)
    for absent in ("#replicas", "#adapters"):  # of one engine without adapters
        expect(page.locator(absent)).to_be_hidden()
    requests = chart(page, "Requests")
    expect(requests.locator(".now")).to_have_text("1running0waiting")
    expect(chart(page, "Output").locator(".now")).to_have_text(
        re.compile(r"^[\d.]*[1-9][\d.]*tokens/s$")
    )
    first_token = chart(page, "Time to first token")
    expect(first_token.locator(".now")).to_have_text(
        re.compile(r"^[\d.]+m?s median[\d.]+m?s 95th percentile$")
    )
    expect(first_token.get_by_role("img")).to_have_attribute(
        "aria-label",
        re.compile(r"^Time to first token: [\d.]+ m?s median, [\d.]+ m?s 95th percentile$"),
    )
    show_view(page, "Chat")
    page.get_by_role("button", name="Stop").click()
    show_view(page, "Server")
    expect(requests.locator(".now")).to_have_text("0running0waiting")


def test_a_charts_axes_say_what_they_are(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server)
    show_view(page, "Server")
    requests = chart(page, "Requests")
    expect(requests.locator(".scale span")).to_have_text(["4", "2", "0"])
    cache = chart(page, "KV cache")
    expect(cache.locator(".scale span")).to_have_text(["10 %", "5 %", "0 %"])
    for minutes in (2, 15, 60):
        page.get_by_label("Show the last").select_option(str(minutes))
        times = [f"−{minutes} min", f"−{minutes / 2:g} min", "now"]
        expect(requests.locator(".times span")).to_have_text(times)


def test_percentiles_are_those_of_prometheus(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    """Linear within a bucket; the last bound if the rank is above all of them."""
    script = r"""async () => {
      const { parseMetrics, quantileBetween } = await import("./static/prometheus.js");
      const look = (counts) => parseMetrics(counts.map(
        (count, index) => `penstock:t_bucket{le="${["1", "2", "+Inf"][index]}"} ${count}`,
      ).join("\n")).buckets;
      const before = look([10, 10, 10]);
      const between = (counts, share) => quantileBetween(before, look(counts), "t", share);
      return [between([14, 18, 18], 0.75), between([10, 10, 11], 0.5), between([10, 10, 10], 0.5)];
    }"""
    assert open_page(server).evaluate(script) == [1.5, 2, None]


def test_a_chart_shows_the_drafts_of_a_server_that_has_some(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server)
    drafts, length = chart(page, "Accepted drafts"), chart(page, "Acceptance length")
    expect(page.locator(READY)).to_be_visible()
    show_view(page, "Server")
    expect(drafts).to_be_hidden()
    expect(length).to_be_hidden()
    looks = itertools.count(1)

    def answer(route: Route) -> None:
        look = next(looks)
        counts = {"num_drafts": 5, "num_draft_tokens": 10, "num_accepted_tokens": 7}
        lines = [f"penstock:spec_decode_{name}_total {n * look}\n" for name, n in counts.items()]
        route.fulfill(body="".join(lines))

    page.route("**/metrics", answer)
    expect(drafts.locator(".now")).to_have_text("70%")
    expect(length.locator(".now")).to_have_text("2.4")


def test_a_proxy_may_keep_the_metrics_to_itself(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server)
    page.route("**/metrics", lambda route: route.fulfill(status=403, body="Forbidden"))
    page.reload()
    expect(page.locator(READY)).to_be_visible()
    show_view(page, "Server")
    expect(page.get_by_text("The metrics cannot be read: Forbidden")).to_be_visible()
    page.unroute("**/metrics")
    expect(page.get_by_text("The metrics cannot be read")).to_have_count(0)


def test_the_page_says_when_the_server_is_gone(
    server: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(server)
    expect(page.locator(READY)).to_be_visible()
    page.route("**/health", lambda route: route.fulfill(status=503, body=""))
    expect(page.get_by_role("status")).to_have_text("engine is down")
    page.context.set_offline(True)
    page.unroute("**/health")
    expect(page.get_by_role("status")).to_have_text("unreachable")
    page.context.set_offline(False)
    expect(page.locator(READY)).to_be_visible()
