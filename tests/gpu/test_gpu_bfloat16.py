"""bfloat16 on a GPU: as near to the exact result as another correct path is, and graphs change no
bit of it.

Exact is float32 on weights that bfloat16 can hold. The other correct path is the reference on a
CPU in bfloat16: how far that is from exact is what this precision costs a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from gpu_runs import PROMPTS, run, sampling, tokens
from tiny_models import make_checkpoint

from penstock.protocol.outputs import RequestOutput

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EXACT = {"device": "cpu", "dtype": "float32", "cpu_backend": "torch"}
OTHER = {"device": "cpu", "dtype": "bfloat16", "cpu_backend": "torch"}
OURS = {"device": "cuda", "dtype": "bfloat16"}
MEAN_FACTOR, MAX_FACTOR = 1.3, 2.0
DRAFTS = {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}}


@pytest.fixture(scope="module", params=["qwen3", "llama", "mistral_windowed"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), request.param)
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    safetensors.torch.save_file(rounded, path, metadata={"format": "pt"})
    return folder


def logprobs(
    checkpoint: Path, prompts: Sequence[Sequence[int]], options: dict[str, Any]
) -> list[list[float]]:
    """Of each prompt, those of all tokens at all positions but the first."""
    outputs = run(
        checkpoint, sampling(max_tokens=1, prompt_logprobs=-1), prompts, max_logprobs=-1,
        enable_prefix_caching=False, **options,
    )  # fmt: skip
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        positions = [position for position in output.prompt_logprobs if position is not None]
        found.append([at[token].logprob for at in positions for token in range(len(at))])
    return found


def differences(ours: list[list[float]], exact: list[list[float]]) -> torch.Tensor:
    return torch.cat([
        (torch.tensor(mine) - torch.tensor(theirs)).abs()
        for mine, theirs in zip(ours, exact, strict=True)
    ])  # fmt: skip


def assert_as_near(ours: torch.Tensor, other: torch.Tensor) -> None:
    assert ours.isfinite().all()
    assert float(ours.mean()) < MEAN_FACTOR * float(other.mean())
    assert float(ours.max()) < MAX_FACTOR * float(other.max())


@ON_GPU
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}])
def test_logits_of_prompts_are_as_near_to_exact_as_another_paths(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    exact = logprobs(checkpoint, PROMPTS, EXACT)
    other = differences(logprobs(checkpoint, PROMPTS, OTHER), exact)
    ours = differences(logprobs(checkpoint, PROMPTS, {**OURS, **options}), exact)
    assert_as_near(ours, other)


def decoded_logprobs(outputs: list[RequestOutput]) -> list[list[float]]:
    return [
        [at[token].logprob for at, token in zip(own.logprobs, own.token_ids, strict=True)]
        for own in (output.outputs[0] for output in outputs)
        if own.logprobs is not None
    ]


@ON_GPU
@pytest.mark.parametrize("options", [{}, DRAFTS])
def test_logits_of_decoded_tokens_are_as_near_to_exact_as_another_paths(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    """Both CPU paths are asked about the very tokens that the GPU chose."""
    outputs = run(checkpoint, sampling(logprobs=0), **OURS, **options)
    texts = [[*prompt, *own] for prompt, own in zip(PROMPTS, tokens(outputs), strict=True)]
    exact, other = (
        [
            [at[token] for at, token in zip(rows, text[len(prompt) :], strict=True)]
            for rows, text, prompt in zip(
                (_rows(own, len(prompt)) for own, prompt in zip(found, PROMPTS, strict=True)),
                texts, PROMPTS, strict=True,
            )
        ]
        for found in (logprobs(checkpoint, texts, path) for path in (EXACT, OTHER))
    )  # fmt: skip
    assert_as_near(differences(decoded_logprobs(outputs), exact), differences(other, exact))


def _rows(flat: list[float], num_prompt_tokens: int, vocab_size: int = 256) -> list[list[float]]:
    """The rows that predict what follows the prompt, of `logprobs`' list for one text."""
    rows = [flat[start : start + vocab_size] for start in range(0, len(flat), vocab_size)]
    return rows[num_prompt_tokens - 1 :]


@ON_GPU
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}])
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 48}, {"max_num_seqs": 4}, DRAFTS]
)
def test_graphs_change_neither_a_token_nor_a_bit_of_its_logprob(
    checkpoint: Path, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    """Without graphs the same padded steps are launched kernel by kernel."""
    params = sampling(max_tokens=80, logprobs=0, **settings)
    graphs, eager = (
        run(checkpoint, params, enforce_eager=eager, **OURS, **options) for eager in (False, True)
    )
    assert tokens(graphs) == tokens(eager)
    assert decoded_logprobs(graphs) == decoded_logprobs(eager)


def test_a_path_that_loses_precision_is_told_from_one_that_is_as_good() -> None:
    """The comparison itself: noise of the same size passes, of twice the size it does not."""
    torch.manual_seed(0)
    other, same, twice = torch.randn(3, 5000).abs() * torch.tensor([[1.0], [1.0], [2.0]])
    assert_as_near(same, other)
    with pytest.raises(AssertionError):
        assert_as_near(twice, other)
