"""The page at / of models that pool, in a real browser, against real servers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accessibility import faults_of_server, grave_faults
from page_actions import give_keys
from playwright.sync_api import Locator, Page, expect
from server_process import DUMMY, ServerProcess, make_tiny_model

LINES = ["a river", "a stream of water", "the <b>price</b> of bread", "bread & butter!"]
LABELS = ["bad", "neither", "good"]
KEY = "open-sesame"
PHONE = {"width": 390, "height": 844}

# The contrast of a cell's text, by WCAG's formula. Colours are rgb() or color(srgb ...).
CONTRAST = """cell => {
  const light = (colour) => {
    const scale = colour.startsWith("rgb") ? 255 : 1;
    const parts = colour.match(/[\\d.]+(?:e-?\\d+)?/g).slice(0, 3).map((part) => part / scale);
    const linear = parts.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const style = getComputedStyle(cell);
  const [low, high] = [light(style.color), light(style.backgroundColor)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""


@pytest.fixture(scope="module")
def embedder(tiny_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(tiny_model), *DUMMY, "--runner", "pooling") as process:
        yield process


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Three labels, behind a key."""
    folder = make_tiny_model(tmp_path_factory.mktemp("classifier"))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    config["id2label"] = {str(index): label for index, label in enumerate(LABELS)}
    (folder / "config.json").write_text(json.dumps(config))
    with ServerProcess(str(folder), *DUMMY, "--api-key", KEY) as process:
        yield process


def part(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def compare(page: Page, *lines: str) -> Locator:
    """Compares these; where the answer will be."""
    similarity = part(page, "Similarity")
    similarity.get_by_label("Texts, one per line").fill("\n".join(lines))
    similarity.get_by_label("Texts, one per line").press("Control+Enter")
    return similarity


def expect_matrix(similarity: Locator, lines: list[str]) -> Locator:
    """The cells, once the matrix is that of these lines."""
    heads = [f"{index} {line}" for index, line in enumerate(lines, 1)]
    expect(similarity.locator("tbody th")).to_have_text(heads)
    return similarity.locator("tbody td")


def cosines(server: ServerProcess, lines: list[str]) -> Any:
    data = server.post("/v1/embeddings", {"input": lines}).json()["data"]
    vectors = np.array([item["embedding"] for item in data])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors @ vectors.T


def numbers(cells: Locator) -> list[float]:
    return [float(text.replace("−", "-")) for text in cells.all_inner_texts()]


# -- models that embed


def test_an_embedder_has_a_playground_in_place_of_the_chat(
    embedder: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(embedder)
    expect(part(page, "Similarity")).to_be_visible()
    expect(part(page, "Rerank")).to_be_visible()
    for absent in ("#chat", "#settings", "#classify"):
        expect(page.locator(absent)).to_be_hidden()
    page.get_by_role("button", name="Server").click()
    expect(page.locator(".chart:visible h3")).to_have_text(
        ["Requests", "Prompts", "Queue time", "KV cache", "Prefix cache hits"]
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_are_compared_in_a_matrix_that_can_be_read(
    embedder: ServerProcess, open_page: Callable[..., Page], scheme: str
) -> None:
    page = open_page(embedder, color_scheme=scheme)
    similarity = compare(page, *LINES[:2], "", "  ", *LINES[2:])
    cells = expect_matrix(similarity, LINES)
    expected = cosines(embedder, LINES).ravel()
    np.testing.assert_allclose(numbers(cells), expected, atol=0.0051)
    assert expected.min() < 0
    shares = cells.evaluate_all("all => all.map((cell) => cell.style.getPropertyValue('--share'))")
    np.testing.assert_allclose([float(share) for share in shares], np.abs(expected), atol=1e-5)
    expect(similarity.locator("td.negative")).to_have_count(int((expected < 0).sum()))
    expect(similarity.locator(".facts")).to_have_text(
        re.compile(rf"^32 dimensions · {sum(map(len, LINES))} tokens · [\d.]+ s$")
    )
    for cell in cells.all():  # the worst case of each colour, whatever the model found
        for name in ("", "negative"):
            cell.evaluate("(cell, name) => { cell.className = name; }", name)
            cell.evaluate("cell => cell.style.setProperty('--share', 1)")
            assert cell.evaluate(CONTRAST) >= 4.5


def test_documents_are_listed_by_relevance(
    embedder: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(embedder)
    rerank = part(page, "Rerank")
    rerank.get_by_label("Query").fill("water")
    rerank.get_by_label("Documents, one per line").fill("\n".join(LINES))
    rerank.get_by_role("button", name="Rerank").click()
    expect(rerank.locator(".facts")).to_be_visible()
    body = {"query": "water", "documents": LINES}
    results = embedder.post("/rerank", body).json()["results"]
    rows = rerank.get_by_role("listitem")
    expect(rows.locator(".text")).to_have_text([LINES[result["index"]] for result in results])
    scores = [result["relevance_score"] for result in results]
    np.testing.assert_allclose(numbers(rows.locator(".score")), scores, atol=1e-4)


def test_of_two_comparisons_the_last_is_shown(
    embedder: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(embedder)
    expect(part(page, "Similarity")).to_be_visible()
    with embedder.engine_stopped():
        compare(page, "one", "two", "three")
        expect(page.locator("#similarity + .result")).to_have_attribute("aria-busy", "true")
        similarity = compare(page, "four", "five")
    expect_matrix(similarity, ["four", "five"])
    expect(page.locator(".result[aria-busy]")).to_have_count(0)


def test_what_is_wrong_is_said_in_words(
    embedder: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(embedder)
    similarity = compare(page, "alone")
    fault = similarity.get_by_role("alert")
    expect(fault).to_have_text("Write at least two lines.")
    expect(similarity.get_by_label("Texts, one per line")).to_be_focused()
    compare(page, *["line"] * 41)
    expect(fault).to_have_text("The matrix has room for 40 lines, and these are 41.")
    compare(page, "short", "long" * 100)
    expect(fault).to_contain_text("truncate_prompt_tokens")
    page.context.set_offline(True)
    compare(page, "one", "two")
    expect(fault).to_have_text("The server cannot be reached.")
    page.context.set_offline(False)
    compare(page, "one", "two")
    expect_matrix(similarity, ["one", "two"])
    expect(fault).to_have_count(0)

    rerank = part(page, "Rerank")
    rerank.get_by_label("Query").fill(" ")
    rerank.get_by_label("Query").press("Enter")
    expect(rerank.get_by_role("alert")).to_have_text("Write a query.")
    rerank.get_by_label("Query").fill("water")
    rerank.get_by_label("Documents, one per line").fill("\n")
    rerank.get_by_role("button", name="Rerank").click()
    expect(rerank.get_by_role("alert")).to_have_text("Write at least one line.")


def test_a_phone_scrolls_a_wide_matrix_by_itself(
    embedder: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(embedder, viewport=PHONE, has_touch=True, is_mobile=True)
    lines = [f"line {number} of a dozen" for number in range(12)]
    expect_matrix(compare(page, *lines), lines)
    part(page, "Rerank").get_by_role("button", name="Rerank").tap()
    expect(part(page, "Rerank").locator(".facts")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    matrix = part(page, "Similarity matrix")
    assert matrix.evaluate("box => box.scrollWidth > box.clientWidth")
    expect(page.get_by_role("navigation").get_by_role("button")).to_have_text(
        ["Playground", "Server"]
    )
    page.get_by_role("button", name="Server", exact=True).tap()
    expect(page.locator("#charts")).to_be_visible()
    expect(matrix).to_be_hidden()
    page.get_by_role("button", name="Playground").tap()
    expect(matrix).to_be_visible()


def test_the_playground_can_be_used_from_the_keyboard(
    embedder: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(embedder)
    expect_matrix(compare(page, "one", "two"), ["one", "two"])
    reached = [page.evaluate("document.activeElement.name")]
    for _ in range(5):
        page.keyboard.press("Tab")
        focused = "(({ name, ariaLabel, textContent }) => name || ariaLabel || textContent)"
        reached.append(page.evaluate(f"{focused}(document.activeElement)"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert reached == ["texts", "Compare", "Similarity matrix", "query", "documents", "Rerank"]
    page.keyboard.press("Enter")
    expect(part(page, "Rerank").get_by_role("listitem")).to_have_count(4)


def test_a_model_without_a_playground_is_said_to_have_none(
    embedder: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(embedder)
    listed = embedder.get("/v1/models").json()
    listed["data"][0]["tasks"] = ["token_embed"]
    page.route("**/v1/models", lambda route: route.fulfill(json=listed))
    page.reload()
    expect(page.get_by_text("one vector per token")).to_be_visible()
    expect(page.get_by_role("link", name="API reference")).to_have_attribute(
        "href", "docs#post-pooling"
    )
    expect(page.locator("#pooling section:visible")).to_have_count(0)


def test_a_model_without_a_kv_cache_has_no_charts_of_one(
    tmp_path: Path, open_page: Callable[..., Page]
) -> None:
    folder = make_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["BertModel"], "model_type": "bert"}
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.closing(ServerProcess(str(folder), *DUMMY)) as server:
        page = open_page(server)
        expect_matrix(compare(page, *LINES), LINES)
        page.get_by_role("button", name="Server").click()
        expect(page.locator(".chart:visible h3")).to_have_text(
            ["Requests", "Prompts", "Queue time"]
        )


def test_axe_finds_nothing_serious_in_the_playground(
    embedder: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(embedder, viewport=PHONE)
    expect_matrix(compare(page, *LINES), LINES)
    part(page, "Rerank").get_by_role("button", name="Rerank").click()
    expect(part(page, "Rerank").locator(".facts")).to_be_visible()
    compare(page, "alone")
    expect(part(page, "Similarity").get_by_role("alert")).to_be_visible()
    faults = grave_faults(page)
    page.emulate_media(color_scheme="dark")
    faults += grave_faults(page, "header", "#pooling")
    assert faults + faults_of_server(page) == []


# -- models that classify


def test_a_model_with_one_label_classifies_and_reranks(
    tmp_path: Path, open_page: Callable[..., Page]
) -> None:
    folder = make_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "good"}}
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.closing(ServerProcess(str(folder), *DUMMY)) as server:
        page = open_page(server)
        expect(part(page, "Similarity")).to_be_hidden()
        classify = part(page, "Classify")
        classify.get_by_label("Texts, one per line").fill("\n".join(LINES))
        classify.get_by_role("button", name="Classify").click()
        expect(classify.get_by_role("heading", level=3)).to_have_text(LINES)
        expect(classify.locator(".text")).to_have_text(["good"] * len(LINES))
        data = server.post("/classify", {"input": LINES}).json()["data"]
        expected = [item["probs"][0] for item in data]
        np.testing.assert_allclose(numbers(classify.locator(".score")), expected, atol=1e-4)

        rerank = part(page, "Rerank")
        rerank.get_by_label("Query").fill("bread")
        rerank.get_by_label("Documents, one per line").fill("\n".join(LINES))
        rerank.get_by_role("button", name="Rerank").click()
        expect(rerank.get_by_role("listitem")).to_have_count(len(LINES))
        results = server.post("/rerank", {"query": "bread", "documents": LINES}).json()["results"]
        best = [LINES[result["index"]] for result in results]
        expect(rerank.locator(".text")).to_have_text(best)


def test_a_classifier_shows_the_probabilities_of_its_labels(
    classifier: ServerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(classifier)
    give_keys(page, "wrong", KEY)
    classify = part(page, "Classify")
    field = classify.get_by_label("Texts, one per line")
    expect(field).to_be_focused()
    for absent in ("#chat", "#similarity", "#rerank"):
        expect(page.locator(absent)).to_be_hidden()
    field.fill("\n".join(LINES[:2]))
    classify.get_by_role("button", name="Classify").click()
    expect(classify.get_by_role("heading", level=3)).to_have_text(LINES[:2])
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = classifier.post("/classify", {"input": LINES[:2]}, headers=headers).json()
    for item, shown in zip(reply["data"], classify.get_by_role("list").all(), strict=True):
        order = np.argsort(item["probs"])[::-1]
        expect(shown.locator(".text")).to_have_text([LABELS[index] for index in order])
        expected = [item["probs"][index] for index in order]
        np.testing.assert_allclose(numbers(shown.locator(".score")), expected, atol=1e-4)
