"""Adapters in the Python API: which requests run with which adapter, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapters import MergedReference, make_adapter, reference_tokens
from tiny_engine import open_llm
from tiny_models import Reference

from penstock import LLM, AsyncLLM, LoRARequest, SamplingParams
from penstock.engine import lora_requests
from penstock.protocol.errors import AdapterError, InputError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(start, start + 20))} for start in (3, 40, 77)]


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of different ranks and layers."""
    root = tmp_path_factory.mktemp("adapters")
    settings = [
        {"target_modules": "all-linear", "r": 8},
        {"target_modules": ["q_proj", "v_proj"], "r": 4},
        {"target_modules": "all-linear", "r": 16},
    ]
    return [
        make_adapter(root / f"adapter-{seed}", checkpoint, seed, **own)
        for seed, own in enumerate(settings)
    ]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, folders: list[Path]) -> list[list[list[int]]]:
    """The tokens of all prompts: of the base, then of each adapter."""
    references = [Reference(checkpoint), *(MergedReference(checkpoint, path) for path in folders)]
    return [reference_tokens(reference, PROMPTS, 8) for reference in references]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with open_llm(checkpoint, enable_lora=True, max_loras=2) as llm:
        yield llm


def requests_of(folders: list[Path]) -> list[LoRARequest]:
    return [LoRARequest(path.name, 1 + i, str(path)) for i, path in enumerate(folders)]


def tokens_of(outputs: list) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_one_adapter_for_all_prompts(
    llm: LLM, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    for request, tokens in zip(requests_of(folders), expected[1:], strict=True):
        outputs = llm.generate(PROMPTS, GREEDY, lora_request=request, use_tqdm=False)
        assert tokens_of(outputs) == tokens


def test_base_and_three_adapters_in_one_batch_with_two_slots(
    llm: LLM, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    variants = [None, *requests_of(folders)]
    prompts = [prompt for prompt in PROMPTS for _ in variants]
    outputs = llm.generate(prompts, GREEDY, lora_request=variants * len(PROMPTS), use_tqdm=False)
    wanted = [expected[v][p] for p in range(len(PROMPTS)) for v in range(len(variants))]
    assert tokens_of(outputs) == wanted


def test_a_stream_uses_its_adapter(
    llm: LLM, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    request = requests_of(folders)[0]
    *_, last = llm.stream(PROMPTS[1], GREEDY, lora_request=request)
    assert last.outputs[0].token_ids == expected[1][1]


def test_the_prefix_cache_keeps_adapters_apart(llm: LLM, folders: list[Path]) -> None:
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": list(range(50, 98))}
    hits = []
    for request in [None, *requests_of(folders)[:2]] * 2:
        (output,) = llm.generate(prompt, GREEDY, lora_request=request, use_tqdm=False)
        hits.append(output.num_cached_tokens)
    assert hits[:3] == [0, 0, 0]
    assert all(hits[3:])


def test_other_weights_at_the_same_path_are_another_adapter(
    llm: LLM, checkpoint: Path, folders: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(folders[0], tmp_path / "x")
    request = LoRARequest("x", 1, str(tmp_path / "x"))
    (before,) = llm.generate(PROMPTS[0], GREEDY, lora_request=request, use_tqdm=False)
    shutil.rmtree(tmp_path / "x")
    shutil.copytree(folders[2], tmp_path / "x")
    (after,) = llm.generate(PROMPTS[0], GREEDY, lora_request=request, use_tqdm=False)
    (alone,) = llm.generate(
        PROMPTS[0], GREEDY, lora_request=requests_of(folders)[2], use_tqdm=False
    )
    assert before.outputs[0].token_ids != after.outputs[0].token_ids
    assert after.outputs[0].token_ids == alone.outputs[0].token_ids


def test_the_content_is_read_again_only_if_a_file_has_changed(
    llm: LLM, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = requests_of(folders)[0]
    llm.generate(PROMPTS[0], GREEDY, lora_request=request, use_tqdm=False)

    def refuse(path: Path) -> str:
        raise AssertionError("read again")

    monkeypatch.setattr(lora_requests, "adapter_digest", refuse)
    llm.generate(PROMPTS[0], GREEDY, lora_request=request, use_tqdm=False)


def test_an_adapter_that_is_none_raises_before_anything_runs(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no adapter at"):
        llm.generate(PROMPTS, lora_request=LoRARequest("x", 1, str(tmp_path / "none")))
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
        llm.generate(PROMPTS, lora_request=LoRARequest("x", 1, str(tmp_path)))
    assert not llm.engine.has_work()


def test_an_adapter_that_does_not_fit_raises_and_harms_nobody(
    llm: LLM, checkpoint: Path, folders: list[Path], tmp_path: Path, expected: list[list[list[int]]]
) -> None:
    large = make_adapter(tmp_path / "large", checkpoint, r=32, target_modules=["q_proj"])
    with pytest.raises(InputError, match=r"LoRA adapter 'large' cannot be loaded: .*max.lora.rank"):
        llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("large", 1, str(large)))
    outputs = llm.generate(PROMPTS, GREEDY, lora_request=requests_of(folders)[1], use_tqdm=False)
    assert tokens_of(outputs) == expected[2]


@pytest.mark.parametrize("given", ["a path", [None], [None, None, "x"]])
def test_what_is_no_lora_request_is_refused(llm: LLM, given: object) -> None:
    with pytest.raises(InputError, match="lora_request must be"):
        llm.generate(PROMPTS, lora_request=given)  # type: ignore[arg-type]


def test_an_engine_without_lora_refuses_adapters(checkpoint: Path, folders: list[Path]) -> None:
    with (
        open_llm(checkpoint) as llm,
        pytest.raises(InputError, match="lora_request needs enable_lora=True"),
    ):
        llm.generate(PROMPTS, lora_request=requests_of(folders)[0])


def test_the_asynchronous_api_takes_adapters(
    checkpoint: Path, folders: list[Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    async def run() -> None:
        options = {"max_model_len": 64, "kv_cache_memory_bytes": 2**24, "dtype": "float32"}
        llm = AsyncLLM(str(checkpoint), enable_lora=True, skip_tokenizer_init=True, **options)

        async def last(request: LoRARequest | None, prompt: dict) -> list[int]:
            tokens: list[int] = []
            async for output in llm.generate(prompt, GREEDY, lora_request=request):
                tokens = output.outputs[0].token_ids
            return list(tokens)

        async with llm:
            variants = [None, *requests_of(folders)]
            got = await asyncio.gather(*(last(v, PROMPTS[0]) for v in variants))
            assert got == [tokens[0] for tokens in expected]
            config = json.loads((folders[0] / "adapter_config.json").read_text())
            broken = shutil.copytree(folders[0], tmp_path / "broken")
            (broken / "adapter_config.json").write_text(json.dumps(config | {"r": 300}))
            with pytest.raises(InputError, match="LoRA adapter 'broken' cannot be loaded"):
                await last(LoRARequest("broken", 9, str(broken)), PROMPTS[0])
            assert await last(variants[1], PROMPTS[1]) == expected[1][1]

    asyncio.run(run())
