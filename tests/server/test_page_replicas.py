"""The page at / shows the replicas, in a real browser."""

from __future__ import annotations

from collections.abc import Callable

from accessibility import faults_of_server
from playwright.sync_api import Page, expect
from server_process import ServerProcess


def test_each_replica_is_shown_with_its_state(
    serve_tiny: Callable[..., ServerProcess], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve_tiny("-dp", "2"))
    items = page.locator("#replicas li")
    expect(items).to_have_count(2)
    expect(items.nth(1)).to_contain_text("Replica 1: serving, 0 requests, KV cache")
    assert faults_of_server(page, "#replicas") == []
