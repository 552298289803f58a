"""The engine on a GPU against the reference path on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_checkpoint

from penstock.llm import LLM
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [[1 + (index * step) % 250 for index in range(length)] for step, length in
           ((1, 3), (3, 40), (7, 150), (11, 17), (5, 64), (13, 1))]  # fmt: skip
SETTINGS = {"max_model_len": 256, "kv_cache_memory_bytes": 2**28, "skip_tokenizer_init": True}


@pytest.fixture(scope="module", params=["qwen3", "llama", "mistral_windowed"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


def run(checkpoint: Path, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    with LLM(str(checkpoint), **{**SETTINGS, "dtype": "float32", **options}) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"async_scheduling": False},
                                     {"max_num_batched_tokens": 48}, {"max_num_seqs": 2},
                                     {"block_size": 64}])  # fmt: skip
def test_greedy_tokens_are_the_cpus(checkpoint: Path, options: dict[str, Any]) -> None:
    expected = tokens(run(checkpoint, GREEDY, device="cpu"))
    assert tokens(run(checkpoint, GREEDY, device="cuda", **options)) == expected


def test_seeded_draws_are_the_cpus(checkpoint: Path) -> None:
    for settings in ({}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1, "repetition_penalty": 1.3}):
        params = SamplingParams(
            temperature=0.9, seed=5, max_tokens=30, ignore_eos=True, detokenize=False, **settings
        )
        expected = tokens(run(checkpoint, params, device="cpu"))
        assert tokens(run(checkpoint, params, device="cuda")) == expected


def test_bfloat16_logits_are_those_of_the_reference_within_its_precision(checkpoint: Path) -> None:
    """Log-probabilities of the prompts and of the first token: no choice of tokens in between."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    exact = run(checkpoint, params, device="cpu")
    for eager in (False, True):
        rounded = run(
            checkpoint, params, device="cuda", dtype="bfloat16", enforce_eager=eager,
            enable_prefix_caching=False,
        )  # fmt: skip
        differences = [
            abs(next(iter(ours.values())).logprob - next(iter(theirs.values())).logprob)
            for mine, reference in zip(rounded, exact, strict=True)
            for ours, theirs in zip(
                mine.prompt_logprobs[1:], reference.prompt_logprobs[1:], strict=True
            )
        ]
        assert sum(differences) / len(differences) < 0.25
        assert max(differences) < 3.0


def test_graphs_do_not_change_the_first_token_in_bfloat16(checkpoint: Path) -> None:
    one, other = (
        tokens(run(checkpoint, GREEDY, device="cuda", dtype="bfloat16", enforce_eager=eager))
        for eager in (False, True)
    )
    # Padding may choose another matmul kernel: paths may part, but not from the start.
    assert [first[0] for first in one] == [first[0] for first in other]


def test_no_step_of_a_steady_state_waits_for_the_device(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **SETTINGS, dtype="float32", device="cuda") as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        for _ in range(2):  # the second time a step's size comes up, its graph is captured
            llm.generate(prompts, GREEDY, use_tqdm=False)
        requests = [llm._prepare(prompt, GREEDY) for prompt in prompts]
        torch.cuda.set_sync_debug_mode("error")  # anything but an event's wait raises
        try:
            llm._submit(requests)
            while llm.engine.has_work():
                llm._step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
        assert [list(r.assembler.take().outputs[0].token_ids) for r in requests] == expected


def test_a_peak_step_that_does_not_fit_names_the_remedy(checkpoint: Path) -> None:
    from penstock.protocol.errors import ConfigError

    options = {**SETTINGS, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.005}
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization"):
        LLM(str(checkpoint), **options, device="cuda")
