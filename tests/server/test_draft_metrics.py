"""Speculation as a client and an operator see it: counts in the response and in /metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import DUMMY, ServerProcess
from waiting import eventually

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "adaptive": False,  # what is drafted does not depend on times
}
PROMPT = [5, 6, 7, 8] * 6
BODY = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def drafting(tiny_model: Any) -> Iterator[ServerProcess]:
    with ServerProcess(
        str(tiny_model), *DUMMY, "--speculative-config", json.dumps(NGRAM),
        "--per-request-spec-decode-metrics", "detailed",
    ) as process:  # fmt: skip
        yield process


def counters(process: ServerProcess) -> dict[str, float]:
    """Counters of drafts, by name and position."""
    found = {}
    for family in text_string_to_metric_families(process.get("/metrics").text):
        for sample in family.samples:
            if "spec_decode" in sample.name and sample.name.endswith("_total"):
                name = sample.name.removeprefix("penstock:spec_decode_").removesuffix("_total")
                found[name + sample.labels.get("position", "")] = sample.value
    return found


def complete(process: ServerProcess, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = process.post("/v1/completions", {**BODY, **fields}).json()
    return answer


def check(counts: dict[str, Any]) -> None:
    histogram = counts["acceptance_histogram"]
    accepted = sum(length * count for length, count in enumerate(histogram))
    assert counts["num_drafts"] == sum(histogram) > 0
    assert counts["num_accepted_tokens"] == accepted <= counts["num_draft_tokens"]
    assert counts["mean_acceptance_length"] == 1 + accepted / counts["num_drafts"]
    assert counts["draft_acceptance_rate"] == accepted / counts["num_draft_tokens"]


def test_a_choice_says_how_many_drafts_were_accepted(drafting: ServerProcess) -> None:
    (choice,) = complete(drafting)["choices"]
    check(choice["metrics"]["speculative_decoding"])
    messages = [{"role": "user", "content": "a b a b a b a b"}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    answer = drafting.post("/v1/chat/completions", body).json()
    check(answer["choices"][0]["metrics"]["speculative_decoding"])


def test_the_last_chunk_of_a_stream_says_it(drafting: ServerProcess) -> None:
    lines = drafting.post("/v1/completions", {**BODY, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    *before, last = chunks
    check(last["choices"][0]["metrics"]["speculative_decoding"])
    assert not any("metrics" in choice for chunk in before for choice in chunk["choices"])


def test_a_request_can_opt_out_and_gets_the_same(drafting: ServerProcess) -> None:
    (with_drafts,) = complete(drafting, return_token_ids=True)["choices"]
    (without,) = complete(drafting, return_token_ids=True, speculative=False)["choices"]
    assert without.get("metrics") is None
    assert without["token_ids"] == with_drafts["token_ids"]


def test_the_counters_add_up(drafting: ServerProcess) -> None:
    before = counters(drafting)
    (choice,) = complete(drafting)["choices"]
    own = choice["metrics"]["speculative_decoding"]

    def grown() -> dict[str, float]:
        return {name: value - before.get(name, 0) for name, value in counters(drafting).items()}

    def is_counted() -> bool:
        return grown().get("num_drafts", 0) >= own["num_drafts"]

    eventually(is_counted)
    new = grown()
    assert new["num_drafts"] == own["num_drafts"]
    assert new["num_draft_tokens"] == own["num_draft_tokens"]
    assert new["num_accepted_tokens"] == own["num_accepted_tokens"]
    by_position = [new[f"num_accepted_tokens_per_pos{position}"] for position in range(3)]
    assert sum(by_position) == own["num_accepted_tokens"]


def test_servers_show_nothing_unless_asked(serve_tiny: Callable[..., ServerProcess]) -> None:
    process = serve_tiny("--speculative-config", json.dumps(NGRAM))
    assert complete(process)["choices"][0].get("metrics") is None
