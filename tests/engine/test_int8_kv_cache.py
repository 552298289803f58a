"""`kv_cache_dtype=int8` on the default model: what it saves, what it costs, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.kvcache.hashing import hash_root
from penstock.models.runtime import resolve_dtypes
from penstock.platforms.platform import Platform
from penstock.protocol.errors import ConfigError

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_text()
PROMPTS = [TEXT[:900], "The capital of France is", TEXT[2000:2600], TEXT[5000:5900]]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "cpu_threads": 1}


@pytest.fixture(scope="module")
def llm(default_model: str) -> Iterator[LLM]:
    with LLM(default_model, kv_cache_dtype="int8", **OPTIONS) as llm:
        yield llm


def bits(llm: LLM, prompts: list[Any]) -> list[Any]:
    """What each prompt gives: its tokens, and the exact log-probabilities of the likeliest."""
    answers = [output.outputs[0] for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    return [
        (
            a.token_ids,
            [{token: value.logprob for token, value in row.items()} for row in a.logprobs],
        )
        for a in answers
        if a.logprobs is not None
    ]


def prompt_logprobs(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """The log-probability of each token but the first, given those before it."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    return torch.tensor([row[token].logprob for row, token in rows if row is not None])


def test_a_request_gives_the_same_bits_alone_batched_in_chunks_and_from_cached_prefixes(
    llm: LLM, default_model: str
) -> None:
    expected = bits(llm, PROMPTS)  # the prefix cache is empty, and afterwards it is not
    assert len(expected) == len(PROMPTS)
    assert bits(llm, PROMPTS) == expected
    with LLM(
        default_model,
        kv_cache_dtype="int8",
        enable_prefix_caching=False,
        long_prefill_token_threshold=7,
        **OPTIONS,
    ) as chunked:
        assert [bits(chunked, [prompt])[0] for prompt in PROMPTS] == expected


def test_decoded_tokens_give_the_same_bits_when_prefilled(llm: LLM) -> None:
    prompt = llm.get_tokenizer().encode(PROMPTS[0])
    ((tokens, rows),) = bits(llm, [{"prompt_token_ids": prompt}])
    decoded = [row[token] for row, token in zip(rows, tokens, strict=True)]
    again = prompt_logprobs(llm, [*prompt, *tokens])[len(prompt) - 1 :]
    assert torch.equal(again, torch.tensor(decoded))


def test_perplexity_is_that_of_a_float32_cache_within_two_percent(
    llm: LLM, default_model: str
) -> None:
    token_ids = llm.get_tokenizer().encode(TEXT)[:700]
    with LLM(default_model, kv_cache_dtype="float32", **OPTIONS) as floats:
        expected = prompt_logprobs(floats, token_ids)
        greedy = bits(floats, PROMPTS)
    found = prompt_logprobs(llm, token_ids)
    assert found.mean().item() == pytest.approx(expected.mean().item(), abs=0.02)
    assert (found - expected).abs().mean() < 0.15
    # One near tie changes all that follows it, so only the first tokens must agree.
    first_tokens = [answer[0][0] for answer in bits(llm, PROMPTS)]
    assert first_tokens == [answer[0][0] for answer in greedy]


def test_torch_alone_gives_nearly_the_same(default_model: str, llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(TEXT)[:200]
    options = {**OPTIONS, "gguf_compute": "dequantize", "kv_cache_dtype": "int8"}
    with LLM(default_model, **options) as native:
        expected = prompt_logprobs(native, token_ids)
    with LLM(default_model, cpu_backend="torch", **options) as plain:
        found = prompt_logprobs(plain, token_ids)
    # A last bit that differs moves numbers that stand between two steps of the 8 bits by a step.
    assert (found - expected).abs().mean() < 0.05


def test_the_cache_holds_more_tokens_in_the_same_memory(llm: LLM, default_model: str) -> None:
    def tokens_in_16_mib(dtype: str) -> int:
        with LLM(
            default_model, kv_cache_dtype=dtype, kv_cache_memory_bytes="16MiB", max_model_len=128
        ) as small:
            layout = small.engine.executor.worker.runner.memory.layout  # type: ignore[attr-defined]
            assert layout.total_bytes <= 2**24
            return int(layout.num_blocks * layout.groups[0].block_size)

    # 64 numbers and a scale: 68 bytes instead of 128.
    ratio = tokens_in_16_mib("int8") / tokens_in_16_mib("float16")
    assert ratio == pytest.approx(128 / 68, rel=0.02)


def test_prefixes_of_another_cache_type_have_other_names() -> None:
    assert hash_root("model", "int8") != hash_root("model", "float16")


@pytest.mark.parametrize("name", ["fp8_e5m2", "float8_e5m2", "int4"])
def test_other_types_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"one of .*int8, .*, got '{name}'"):
        EngineConfig.from_options({"kv_cache_dtype": name})


def test_a_gpu_is_refused() -> None:
    config = EngineConfig.from_options({"kv_cache_dtype": "int8"})
    gpu = Platform(torch.device("cuda"), True, None, 256, 8192, "nccl")
    with pytest.raises(ConfigError, match="int8 is for CPUs, got device=cuda"):
        resolve_dtypes(config, {"max_position_embeddings": 128, "rope_theta": 1e4}, gpu)
