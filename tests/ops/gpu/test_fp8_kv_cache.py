"""The KV cache in fp8: what is written, what attention reads, and where its scales come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.layers.attention import Attention
from penstock.ops import reference
from penstock.ops.attention import AttentionMetadata
from penstock.protocol.errors import ConfigError, ModelError

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton.attention import paged_attention
from penstock.ops.triton.rotary import norm_rotate_write

FP8 = torch.float8_e4m3fn
SCALES = (0.5, 0.25)
ON_GPU = torch.cuda.is_available()
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_model_len": 64, "kv_cache_memory_bytes": 2**24,
    "dtype": "float32",
}  # fmt: skip
if not ON_GPU:
    OPTIONS |= {"device": "cpu", "cpu_backend": "torch", "cpu_threads": 1}
PROMPT = {"prompt_token_ids": [1 + (index * 7) % 250 for index in range(20)]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def empty_cache(blocks: int, block_size: int, heads: int, dim: int, device: torch.device) -> Any:
    shape = (blocks, 2, block_size, heads, dim)
    return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(FP8)  # NaN


def test_what_is_written_is_divided_by_its_scale_and_clipped(device: torch.device) -> None:
    cache = empty_cache(3, 4, 1, 16, device)
    key, value = torch.full((2, 1, 16), 6.0), torch.full((2, 1, 16), -1000.0)
    slots = torch.tensor([5, 11], device=device)
    reference.write_kv(key.to(device), value.to(device), cache, slots, SCALES)
    floats = cache.float()
    assert (floats[1, 0, 1] == 12.0).all()
    assert (floats[2, 1, 3] == -448.0).all()
    assert floats.isfinite().sum() == 4 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
def test_the_fused_write_is_the_references(device: torch.device, dtype: torch.dtype) -> None:
    """Of numbers that fp8 has: Triton's interpreter rounds others wrongly."""
    heads, kv_heads, dim = 2, 1, 32
    qkv = torch.randint(-8, 9, (3, (heads + 2 * kv_heads) * dim), device=device).to(dtype)
    cos, sin = torch.ones(3, 1, dim // 2, device=device), torch.zeros(3, 1, dim // 2, device=device)
    slots = torch.tensor([4, 9, 6], device=device)
    ours, theirs = (empty_cache(3, 4, kv_heads, dim, device) for _ in range(2))
    _, key, value = norm_rotate_write(
        qkv, None, None, 0.0, cos.to(dtype), sin.to(dtype), ours, slots, heads, SCALES
    )
    reference.write_kv(key, value, theirs, slots, SCALES)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 9, 20], [30, 40, 7]])
@pytest.mark.parametrize("window", [None, 13])
def test_attention_reads_what_fp8_holds(
    device: torch.device, query_lens: list[int], window: int | None
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim, block_size, seq_lens = 4, 2, 32, 16, [33, 40, 70]
    blocks = [-(-length // block_size) for length in seq_lens]
    cache = empty_cache(sum(blocks) + 1, block_size, kv_heads, dim, device)
    table = torch.zeros(3, max(blocks), dtype=torch.int32)
    for index, length in enumerate(seq_lens):
        first = 1 + sum(blocks[:index])
        table[index, : blocks[index]] = torch.arange(first, first + blocks[index])
        slots = torch.arange(length, device=device) + first * block_size
        key, value = torch.randn(2, length, kv_heads, dim, device=device)
        reference.write_kv(key, value, cache, slots, SCALES)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32)
    metadata = AttentionMetadata(
        query_starts=starts.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        num_decodes=sum(length == 1 for length in query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    query = torch.randn(sum(query_lens), heads, dim, device=device)
    arguments = (query, cache, metadata, dim**-0.5, window)
    ours = paged_attention(*arguments, kv_scales=SCALES)
    theirs = reference.paged_attention(*arguments, kv_scales=SCALES)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    other = reference.paged_attention(*arguments, kv_scales=(0.5, 0.5))
    torch.testing.assert_close(other, 2 * theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def with_tensors(checkpoint: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    weights = safetensors.torch.load_file(checkpoint / "model.safetensors")
    safetensors.torch.save_file(
        {**weights, **tensors}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    return folder


def logprobs(checkpoint: Path, **options: Any) -> list[float]:
    with LLM(str(checkpoint), **OPTIONS, **options) as llm:
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_logprobs[1:], PROMPT["prompt_token_ids"][1:], strict=True)
    return [at[token].logprob for at, token in pairs if at is not None]


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_an_engine_with_an_fp8_cache_is_near_to_one_without(checkpoint: Path, name: str) -> None:
    exact, rounded = logprobs(checkpoint), logprobs(checkpoint, kv_cache_dtype=name)
    differences = [abs(a - b) for a, b in zip(exact, rounded, strict=True)]
    assert 0.0 < sum(differences) / len(differences) < 0.1


NAMES = [
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
]


@pytest.mark.parametrize("names", NAMES)
def test_scales_come_from_the_checkpoint(
    checkpoint: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    count = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    tensors = {
        f"model.layers.{layer}.{name}": torch.tensor([0.02 + number + layer])
        for layer in range(count)
        for number, name in enumerate(names)
    }
    tensors["model.layers.0.self_attn.q_scale"] = torch.tensor(3.0)
    folder = with_tensors(checkpoint, tmp_path, tensors)
    with LLM(str(folder), kv_cache_dtype="fp8", **OPTIONS) as llm:
        model = llm.engine.executor.worker.model  # type: ignore[attr-defined]
        found = [own.kv_scales for own in model.modules() if isinstance(own, Attention)]
    expected = [(0.02 + layer, 1.02 + layer) for layer in range(count)]
    assert found == [pytest.approx(pair) for pair in expected]


def test_a_scale_that_is_none_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}
    with pytest.raises(ModelError, match="must be a positive scale, is 0"):
        LLM(str(with_tensors(checkpoint, tmp_path, tensors)), **OPTIONS)


def test_the_cpus_own_kernels_do_not_take_it(checkpoint: Path) -> None:
    assert EngineConfig.from_options({"kv_cache_dtype": "fp8"}).cache.kv_cache_dtype == "fp8"
    with pytest.raises(ConfigError, match="is for GPUs, got device=cpu: choose int8"):
        LLM(str(checkpoint), kv_cache_dtype="fp8", device="cpu", skip_tokenizer_init=True)
