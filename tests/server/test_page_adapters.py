"""The page at / shows adapters in its list of models, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from accessibility import faults_of_server
from page_actions import say, set_options, wait_for_answer
from playwright.sync_api import Page, expect
from server_process import ServerProcess
from tiny_adapters import write_adapter


def test_adapters_can_be_chosen_and_new_ones_appear(
    serve_tiny: Callable[..., ServerProcess], open_page: Callable[..., Page], tmp_path: Path
) -> None:
    for seed, name in enumerate(("sql", "law")):
        write_adapter(tmp_path / name, seed)
    server = serve_tiny(
        *("--enable-lora", "--allow-runtime-lora-updating", "--served-model-name", "tiny"),
        *("--allowed-lora-paths", str(tmp_path), "--lora-modules", f"sql={tmp_path / 'sql'}"),
    )
    page = open_page(server)
    choice = page.locator("#model")
    expect(choice.locator("option")).to_have_text(["tiny", "sql"])
    expect(choice.locator("optgroup[label=Adapters] option")).to_have_text(["sql"])
    choice.select_option("sql")
    body = {"lora_name": "law", "lora_path": str(tmp_path / "law")}
    assert server.post("/v1/load_lora_adapter", body).status_code == 200
    page.locator("#prompt").focus()
    choice.focus()
    expect(choice.locator("option")).to_have_text(["tiny", "sql", "law"])
    expect(choice).to_have_value("sql")
    set_options(page, max_tokens="2")
    say(page, "Hello")
    wait_for_answer(page)
    page.get_by_role("button", name="Server").click()
    expect(page.locator("#adapters li")).to_have_text(
        [
            "Of running requests: none",
            "Of waiting requests: none",
            re.compile(r"In host memory: [12]"),
        ]
    )
    assert faults_of_server(page, "#adapters") == []
