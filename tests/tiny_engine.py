"""Engines for tiny checkpoints, and what they generate greedily from random prompts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock import LLM, SamplingParams
from penstock.protocol.delta import EngineDelta
from penstock.protocol.sampling import OutputKind
from penstock.text.frontend import PreparedRequest

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "cpu_threads": 1,
    "log_level": "error",
    "kv_cache_memory_bytes": 16 << 20,  # the usual 4 GiB would be a million tiny blocks
}


def open_llm(checkpoint: Path | str, **options: Any) -> LLM:
    return LLM(str(checkpoint), **OPTIONS | options)


def as_replay(request: PreparedRequest, seen: Sequence[int]) -> PreparedRequest:
    """A request of one completion, sent again with tokens that came before an engine died."""
    (child,) = request.children
    if seen:
        request.assembler.add(EngineDelta(request_id=child.request_id, token_ids=list(seen)))
    child = msgspec.structs.replace(child, output_token_ids=list(seen))
    return dataclasses.replace(request, children=[child])


def prepare_replay(
    llm: LLM, prompt: Any, params: SamplingParams, seen: Sequence[int]
) -> PreparedRequest:
    params = msgspec.structs.replace(params, output_kind=OutputKind.FINAL_ONLY)
    return as_replay(llm.frontend.prepare("replay", prompt, params), seen)


def random_prompts(seed: int | str, *lengths: int) -> list[dict[str, list[int]]]:
    """Prompts of token ids, of these lengths."""
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(256) for _ in range(n)]} for n in lengths]


def assert_ranks_agree(checkpoint: Path, prompts: Sequence[Any]) -> None:
    """Two ranks give the tokens of one."""
    with open_llm(checkpoint) as llm:
        expected = greedy_tokens(llm, prompts)
    with open_llm(checkpoint, tensor_parallel_size=2) as llm:
        assert greedy_tokens(llm, prompts) == expected


def greedy_tokens(llm: LLM, prompts: Sequence[Any], num_tokens: int = 16) -> list[list[int]]:
    """So many most likely tokens after each of the prompts, which run together."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def tokens_and_logprobs(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams
) -> list[tuple[list[int], list[dict[int, float]]]]:
    """What each prompt gives: its tokens, and the exact log-probabilities that were asked for."""
    results = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        (answer,) = output.outputs
        assert answer.logprobs is not None
        rows = [{token: value.logprob for token, value in row.items()} for row in answer.logprobs]
        results.append((list(answer.token_ids), rows))
    return results
