"""`--quantization int8`: float checkpoints in 8 bits while they load, through the library and the
command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_engine
import torch
from tiny_models import make_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock import LLM, SamplingParams

OPTIONS = {**tiny_engine.OPTIONS, "enable_prefix_caching": False}
VOCAB = 256
PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 33, 64, 100)
]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=VOCAB)


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 128 columns quantize, the 112 that other tests have do not: down_proj of "qwen3_moe" is of 48.
    return make_checkpoint(
        tmp_path_factory.mktemp("int8"), request.param, intermediate_size=128, initializer_range=0.1
    )


@pytest.fixture(scope="module")
def int8(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), quantization="int8", max_logprobs=-1, **OPTIONS) as llm:
        yield llm


def generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Tokens, and every token's exact log-probability at each of them."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return tiny_engine.tokens_and_logprobs(llm, inputs, PARAMS)


def first_rows(results: list[tuple[list[int], list[dict[int, float]]]]) -> torch.Tensor:
    return torch.tensor([[rows[0][token] for token in range(VOCAB)] for _, rows in results])


def test_logits_are_near_those_of_the_floats(checkpoint: Path, int8: LLM) -> None:
    with LLM(str(checkpoint), max_logprobs=-1, **OPTIONS) as llm:
        floats = first_rows(generate(llm, PROMPTS))
    quantized = first_rows(generate(int8, PROMPTS))
    error = (quantized - floats).std() / floats.std()
    assert 1e-5 < error < 0.03  # 8 bits show, and do no more than that


def test_a_request_gives_the_same_bits_alone_batched_and_in_chunks(
    checkpoint: Path, int8: LLM
) -> None:
    together = generate(int8, PROMPTS)
    assert [generate(int8, [prompt])[0] for prompt in PROMPTS] == together
    for chunk in (1, 16):
        with LLM(
            str(checkpoint),
            quantization="int8",
            max_logprobs=-1,
            long_prefill_token_threshold=chunk,
            **OPTIONS,
        ) as chunked:
            assert generate(chunked, PROMPTS) == together


def test_weights_take_a_quarter_of_the_floats_memory(checkpoint: Path, int8: LLM) -> None:
    def size(llm: LLM) -> int:
        model = llm.engine.executor.worker.model  # type: ignore[attr-defined]
        return sum(buffer.nbytes for name, buffer in model.named_buffers() if ".packed_q" in name)

    with LLM(str(checkpoint), **OPTIONS) as llm:
        assert size(int8) < 0.3 * size(llm)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_the_command_line_gives_the_librarys_tokens(checkpoint: Path, int8: LLM) -> None:
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(VOCAB)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(checkpoint / "tokenizer.json"))
    done = subprocess.run(
        [
            sys.executable, "-m", "penstock", "generate", "--model", str(checkpoint),
            "--quantization", "int8", "--cpu-threads", "1", "--temperature", "0",
            "--kv-cache-memory-bytes", "16MiB", "--ignore-eos",
            "--max-tokens", str(PARAMS.max_tokens),
            " ".join(f"t{token}" for token in PROMPTS[1]),
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ((tokens, _),) = generate(int8, [PROMPTS[1]])
    assert done.stdout.split() == [f"t{token}" for token in tokens]


def test_without_the_library_it_is_by_row(checkpoint: Path) -> None:
    with LLM(str(checkpoint), cpu_backend="torch", max_logprobs=-1, **OPTIONS) as llm:
        floats = first_rows(generate(llm, PROMPTS))
    with LLM(
        str(checkpoint), quantization="int8", cpu_backend="torch", max_logprobs=-1, **OPTIONS
    ) as llm:
        quantized = first_rows(generate(llm, PROMPTS))
    error = (quantized - floats).std() / floats.std()
    assert 1e-5 < error < 0.15  # a token may change its experts
