"""Engines on tiny models, run to the end: what the tests in this folder share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.engine.lora_requests import with_adapters
from penstock.llm import LLM
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import SamplingParams

PROMPTS = [[1 + (index * step) % 250 for index in range(length)] for step, length in
           ((1, 3), (3, 40), (7, 150), (11, 17), (5, 64), (13, 1))]  # fmt: skip
# One thread: a machine with a GPU has many cores, which tiny models would only fight for.
SETTINGS = {"max_model_len": 256, "kv_cache_memory_bytes": 2**28, "skip_tokenizer_init": True,
            "cpu_threads": 1}  # fmt: skip


def sampling(**settings: Any) -> SamplingParams:
    """Greedy, 40 tokens, unless told otherwise."""
    defaults = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**defaults, **settings})


def run(
    checkpoint: Path,
    params: SamplingParams | Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **options: Any,
) -> list[RequestOutput]:
    with LLM(str(checkpoint), **{**SETTINGS, "dtype": "float32", **options}) as llm:
        return llm.generate(as_inputs(prompts), params, use_tqdm=False)


def as_inputs(prompts: Sequence[Sequence[int]]) -> list[Any]:
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(output.error is None for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompt_logprobs(
    checkpoint: Path, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
) -> torch.Tensor:
    """Of the prompts' own tokens: no choice between near equals makes later ones differ."""
    outputs = run(checkpoint, sampling(max_tokens=1, prompt_logprobs=0), prompts, **options)
    found = []
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_logprobs is not None
        pairs = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        found += [at[token].logprob for at, token in pairs if at is not None]
    return torch.tensor(found)


def run_without_waiting(
    llm: LLM, params: Sequence[SamplingParams], adapters: Any = None
) -> list[list[int]] | None:
    """Tokens of a run in which whatever waits for the device, but for an event, raises; None where
    a step did, which fails its requests. LoRA adapters must be in their slots already."""
    prompts = as_inputs(PROMPTS)
    requests = [llm._prepare(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    requests = with_adapters(requests, llm._adapters_of(adapters, len(requests)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        llm._submit(requests)
        while llm.engine.has_work():
            llm._step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    outputs = [request.assembler.take() for request in requests]
    if any(output is None or output.error for output in outputs):
        return None
    return tokens([output for output in outputs if output is not None])
