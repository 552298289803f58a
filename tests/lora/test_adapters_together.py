"""Adapters beside other features: crash replay, pooling, two ranks, structured output."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import make_adapter
from faults.killed import GREEDY, generate_killed
from faults.saboteur import Gate
from structured import byte_model
from tiny_engine import OPTIONS, open_llm

from penstock import (
    LLM,
    AsyncLLM,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from penstock.protocol.errors import InputError

PROMPTS = [{"prompt_token_ids": list(range(start, start + 20))} for start in (3, 40)]
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2}


@pytest.fixture(scope="module")
def requests(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    folders = [
        make_adapter(root / f"a{seed}", checkpoint, seed, target_modules="all-linear")
        for seed in range(3)
    ]
    return [LoRARequest(folder.name, 1, str(folder)) for folder in folders]


def tokens_of(llm: LLM, prompts: list[Any], adapters: Any, params: Any = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def test_requests_with_adapters_outlive_their_engine_unless_their_adapter_is_gone(
    checkpoint: Path, requests: list[LoRARequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SABOTEUR_FLAG", str(tmp_path / "flag"))
    gate = Gate(tmp_path / "flag")
    with open_llm(checkpoint, **LORA) as offline:
        base, expected, other = tokens_of(offline, [PROMPTS[0]] * 3, [None, *requests[:2]])
    assert base != expected != other
    folder = Path(shutil.copytree(requests[0].lora_path, tmp_path / "gone"))

    async def run() -> tuple[RequestOutput, RequestOutput]:
        options = {**OPTIONS, **LORA, "logits_processors": ["faults.saboteur:Saboteur"]}
        async with AsyncLLM(str(checkpoint), **options) as llm:
            good = await generate_killed(llm, gate, PROMPTS[0], lora_request=requests[0])
            leave, gone = partial(shutil.rmtree, folder), LoRARequest("gone", 1, str(folder))
            bad = await generate_killed(llm, gate, PROMPTS[0], leave, lora_request=gone)
            again = llm.generate(PROMPTS[1], GREEDY, lora_request=requests[1])
            assert [output.error async for output in again][-1] is None
            return good, bad

    good, bad = asyncio.run(run())
    assert good.outputs[0].token_ids == expected
    assert bad.error is not None
    assert "LoRA adapter 'gone' cannot be loaded" in bad.error


@pytest.fixture(scope="module")
def two_ranks(checkpoint: Path) -> Iterator[LLM]:
    with open_llm(checkpoint, tensor_parallel_size=2, **LORA) as llm:
        yield llm


def test_two_ranks_give_the_tokens_of_one(
    checkpoint: Path, requests: list[LoRARequest], two_ranks: LLM
) -> None:
    adapters = [None, *requests] * 2
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    with open_llm(checkpoint, **LORA) as llm:
        expected = tokens_of(llm, prompts, adapters)
    assert tokens_of(two_ranks, prompts, adapters) == expected


def test_an_adapter_that_does_not_fit_is_refused_by_two_ranks(
    checkpoint: Path, requests: list[LoRARequest], two_ranks: LLM, tmp_path: Path
) -> None:
    large = make_adapter(tmp_path / "large", checkpoint, r=64, target_modules=["q_proj"])
    with pytest.raises(InputError, match="LoRA adapter 'large' cannot be loaded"):
        tokens_of(two_ranks, PROMPTS, LoRARequest("large", 1, str(large)))
    first, second = (tokens_of(two_ranks, PROMPTS, request) for request in requests[:2])
    assert first != second


def test_vectors_of_a_pooling_model_depend_on_the_adapter(
    checkpoint: Path, requests: list[LoRARequest]
) -> None:
    with open_llm(checkpoint, runner="pooling", **LORA) as llm:

        def vectors(prompts: list[Any], adapters: Any) -> list[Any]:
            outputs = llm.embed(prompts, lora_request=adapters, use_tqdm=False)
            assert [output.error for output in outputs] == [None] * len(outputs)
            return [output.outputs.embedding for output in outputs]

        variants = [None, *requests]
        alone = [vectors(PROMPTS, variant) for variant in variants]
        together = vectors([p for p in PROMPTS for _ in variants], variants * len(PROMPTS))
    for index in range(len(PROMPTS)):
        for v in range(len(variants)):
            mixed = together[index * len(variants) + v]
            np.testing.assert_allclose(mixed, alone[v][index], atol=1e-5)
        assert not np.allclose(alone[0][index], alone[1][index], atol=1e-2)


def test_structured_output_holds_with_adapters(tmp_path: Path) -> None:
    checkpoint = byte_model.make_byte_model(tmp_path / "model")
    folder = make_adapter(tmp_path / "a", checkpoint, target_modules="all-linear")
    request = LoRARequest("a", 1, str(folder))
    structured = StructuredOutputsParams(regex="[ab]{6}(x|y)[0-9]{4}")
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=structured)
    with byte_model.open_llm(str(checkpoint), **LORA) as llm:
        prompts = ["some text, some more"] * 2
        plain, adapted = llm.generate(prompts, params, lora_request=[None, request], use_tqdm=False)
        for output in (plain, adapted):
            assert output.outputs[0].finish_reason == "stop"
            assert len(output.outputs[0].text) == 11
        assert plain.outputs[0].text != adapted.outputs[0].text
