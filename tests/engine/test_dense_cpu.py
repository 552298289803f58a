"""Float checkpoints on a CPU: which types compute in the C++ library, and with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.protocol.outputs import RequestOutput

VOCAB = 331  # no multiple of anything that vectors are made of
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 160,
    "intermediate_size": 224,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 80,
}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "cpu_threads": 1,
    "kv_cache_memory_bytes": 16 * 2**20,
    "log_level": "error",
}
PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 31, 33, 70)
]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
DRAWN = SamplingParams(
    temperature=1.3, top_k=30, top_p=0.8, min_p=0.01, seed=5,
    max_tokens=8, ignore_eos=True, logprobs=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in bfloat16."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path_factory.mktemp("dense"), "llama", **SHAPE)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def bits(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Tokens and exact log-probabilities of each prompt, greedy and drawn."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    runs = [llm.generate(inputs, params, use_tqdm=False) for params in (GREEDY, DRAWN)]
    return [tuple(map(bits_of, outputs)) for outputs in zip(*runs, strict=True)]


def bits_of(output: RequestOutput) -> tuple[list[int], list[dict[int, float]]]:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    rows = [{token: value.logprob for token, value in row.items()} for row in answer.logprobs]
    return list(answer.token_ids), rows


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_weights_in_bfloat16_give_the_same_bits_alone_batched_and_in_chunks(
    checkpoint: Path, kv_cache_dtype: str
) -> None:
    options = {**OPTIONS, "kv_cache_dtype": kv_cache_dtype}
    with LLM(str(checkpoint), enable_prefix_caching=False, **options) as llm:
        together = bits(llm, PROMPTS)
        assert [bits(llm, [prompt])[0] for prompt in PROMPTS] == together
    for chunk in (1, 7):
        with LLM(str(checkpoint), long_prefill_token_threshold=chunk, **options) as chunked:
            assert bits(chunked, PROMPTS) == together
            assert bits(chunked, PROMPTS) == together  # from cached prefixes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_shorter_type_is_that_of_the_weights_and_changes_nothing_else(
    tmp_path: Path, dtype: str
) -> None:
    """The same bits as from a checkpoint that was rounded before, so nothing else was rounded."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path / "float32", "llama", **SHAPE)
    options = {**OPTIONS, "kv_cache_dtype": "float32"}
    with LLM(str(folder), dtype=dtype, **options) as llm:
        asked = bits(llm, PROMPTS)
        assert [bits(llm, [prompt])[0] for prompt in PROMPTS] == asked
    with LLM(str(folder), **options) as llm:
        assert bits(llm, PROMPTS) != asked
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    for name, tensor in model.state_dict().items():
        assert tensor.ndim == 2 or bool((tensor == 1).all()), f"{name} would be rounded too"
    model.save_pretrained(folder)
    with LLM(str(folder), **options) as llm:
        assert bits(llm, PROMPTS) == asked
