"""Models with adapters of their linear layers, on the C++ library and on torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from adapters import FLAVOURS, MakeAdapter, MakeCheckpoint, MergedReference, reference_tokens
from lora_plans import Driver
from tiny_engine import random_prompts

from penstock.layers.linear import Linear
from penstock.models.decoder import DecoderLayer
from penstock.protocol.adapter import DropAdapter, PlaceAdapter
from penstock.protocol.step import StepFailure

PROMPTS = random_prompts("adapters", 3, 21, 40)
LINEAR_FLAVOURS = [
    "all_linear", "rank_1", "rank_64", "q_and_v", "v_alone", "up_alone", "rslora", "dora",
    "dora_biased", "expression", "patterns", "some_layers", "excluded", "bias_all",
    "bias_lora_only", "lora_bias", "fused_layers", "fused_dora",
]  # fmt: skip
TOGETHER = ["rank_64", "dora", "q_and_v"]  # of one model


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("flavour", LINEAR_FLAVOURS)
def test_greedy_tokens_are_those_of_pefts_merged_model(
    checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, flavour: str, backend: str
) -> None:
    checkpoint, adapter = checkpoint_of(FLAVOURS[flavour].variant), adapter_of(flavour)
    driver = Driver(checkpoint, cpu_backend=backend)
    base = driver.generate([driver.request(prompt) for prompt in PROMPTS])
    driver.load(adapter, 2)
    requests = driver.generate([driver.request(prompt, 2) for prompt in PROMPTS])
    driver.close()
    expected = reference_tokens(MergedReference(checkpoint, adapter), PROMPTS)
    assert [request.tokens for request in requests] == expected
    assert [request.tokens for request in base] != expected


@pytest.fixture(scope="module")
def driver(checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter) -> Iterator[Driver]:
    """A worker with an adapter in each slot but the last, on the C++ library with threads."""
    driver = Driver(checkpoint_of("llama"), cpu_threads=2)
    for slot, flavour in enumerate(TOGETHER):
        driver.load(adapter_of(flavour), slot)
    yield driver
    driver.close()


def layers_of(driver: Driver) -> list[DecoderLayer]:
    modules = driver.executor.worker.model.modules()
    return [module for module in modules if isinstance(module, DecoderLayer)]


@pytest.mark.parametrize("chunk", [1000, 7, 1])
def test_base_and_three_adapters_together_give_the_bits_of_each_alone(
    driver: Driver, chunk: int
) -> None:
    slots = [-1, 0, 1, 2]
    cases = [(prompt, slot) for prompt in PROMPTS for slot in slots]
    alone = [driver.generate([driver.request(*case)])[0].bits for case in cases]
    together = driver.generate([driver.request(*case) for case in cases], chunk=chunk)
    assert [request.bits for request in together] == alone
    assert len({tuple(tokens) for tokens, _ in alone}) == len(cases)


def test_layers_in_one_call_give_the_bits_of_their_parts(driver: Driver) -> None:
    cases = [(prompt, slot) for prompt in PROMPTS for slot in (-1, 0, 1, 2)]
    whole = [one.bits for one in driver.generate([driver.request(*case) for case in cases])]
    fused = [layer.fused for layer in layers_of(driver)]
    assert all(each is not None for each in fused)
    for layer in layers_of(driver):
        layer.fused = None
    parts = [one.bits for one in driver.generate([driver.request(*case) for case in cases])]
    for layer, each in zip(layers_of(driver), fused, strict=True):
        layer.fused = each
    assert parts == whole


def test_a_step_without_adapter_rows_is_that_of_an_engine_without_lora(
    driver: Driver, checkpoint_of: MakeCheckpoint
) -> None:
    plain = Driver(checkpoint_of("llama"), cpu_threads=2, enable_lora=False)
    expected = [one.bits for one in plain.generate([plain.request(each) for each in PROMPTS])]
    linears = [
        module for module in plain.executor.worker.model.modules() if isinstance(module, Linear)
    ]
    assert all(linear.adapter is None for linear in linears)
    plain.close()
    own = [one.bits for one in driver.generate([driver.request(each) for each in PROMPTS])]
    assert own == expected


def test_a_slot_is_filled_anew_while_others_run(
    driver: Driver, adapter_of: MakeAdapter, checkpoint_of: MakeCheckpoint
) -> None:
    prompt = PROMPTS[1]
    alone = [driver.generate([driver.request(prompt, slot)])[0].bits for slot in (-1, 1)]
    digests = [driver.fetch(adapter_of(name)) for name in ("all_linear", "rank_1")]
    running = [driver.request(prompt), driver.request(prompt, 1)]
    guest = None
    seen = []
    for number in range(16):
        jobs = []
        if number % 4 == 0:  # the last slot gets the other adapter, and a new request
            jobs = [PlaceAdapter(digests[number // 4 % 2], 3)]
            released = [guest] if guest is not None else []
            guest = driver.request(prompt, 3)
        else:
            released = []
        assert guest is not None
        batch = [*running, guest]
        driver.step(
            [(one, 1 if one.num_computed else len(one.prompt)) for one in batch],
            jobs=jobs,
            released=released,
        )
        if number % 4 == 3:
            seen.append(guest.tokens)
    assert guest is not None
    driver.step(released=[*running, guest], jobs=[DropAdapter(digest) for digest in digests])
    assert [one.bits for one in running] == alone
    for path, tokens in zip([adapter_of("all_linear"), adapter_of("rank_1")], seen, strict=False):
        reference = MergedReference(checkpoint_of("llama"), path)
        assert [tokens] == reference_tokens(reference, [prompt], 4)
    assert seen[2:] == seen[:2]


def test_a_reset_worker_keeps_its_adapters(driver: Driver) -> None:
    before = driver.generate([driver.request(PROMPTS[0], 1)])[0].bits
    driver.step([(driver.request(PROMPTS[1], 0), 5)])
    driver.executor.call("reset")
    assert driver.generate([driver.request(PROMPTS[0], 1)])[0].bits == before


def test_jobs_of_a_skipped_step_are_done(
    driver: Driver, adapter_of: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = driver.fetch(adapter_of("all_linear"))
    driver.step(jobs=[PlaceAdapter(digest, 3)])
    expected = driver.generate([driver.request(PROMPTS[0], 3)])[0].bits
    driver.step(jobs=[PlaceAdapter(driver.fetch(adapter_of("rank_1")), 3)])

    def fail(layout: object) -> None:
        raise RuntimeError("a step fails")

    with monkeypatch.context() as patch:
        patch.setattr(driver.executor.runner.steps, "run", fail)
        assert driver.step([(driver.request(PROMPTS[1], 0), 5)]).failure is StepFailure.ERROR
    skipped = driver.step(jobs=[PlaceAdapter(digest, 3), DropAdapter(digest)])
    assert skipped.failure is StepFailure.SKIPPED
    driver.executor.call("reset")
    assert driver.generate([driver.request(PROMPTS[0], 3)])[0].bits == expected
