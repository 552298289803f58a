"""The quality of each KV cache dtype on a CPU: perplexity and greedy agreement.

    python benchmarks/kv_cache_quality.py [--gguf-compute dequantize] [TEXT ...]

Texts are cut into windows of 1000 tokens. Differences are relative to the first dtype, float32,
with the same weights. The error is that of their mean over the tokens. Greedy tokens count as the
same up to a request's first difference.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from penstock import LLM, SamplingParams
from penstock.config.model import DEFAULT_MODEL

WINDOW, MIN_WINDOW = 1000, 500
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 8, 60, 64


def logprobs_of(llm: LLM, windows: list[list[int]]) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for window in windows:
        (output,) = llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        rows = zip(output.prompt_logprobs[1:], window[1:], strict=True)
        found += [row[token].logprob for row, token in rows if row is not None]
    return torch.tensor(found)


def greedy_of(llm: LLM, windows: list[list[int]]) -> torch.Tensor:
    tokens = [token for window in windows for token in window]
    stride = (len(tokens) - PROMPT_TOKENS) // NUM_PROMPTS
    prompts = [
        {"prompt_token_ids": tokens[index * stride :][:PROMPT_TOKENS]}
        for index in range(NUM_PROMPTS)
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return torch.tensor([output.outputs[0].token_ids for output in outputs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", default=["LICENSE"], metavar="TEXT")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--gguf-compute", default="auto")
    args = parser.parse_args()
    text_of = [Path(path).read_text() for path in args.texts]
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    print("| KV cache | tokens | perplexity | to float32 | same greedy tokens |")
    print("|---|---|---|---|---|")
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        with LLM(
            args.model,
            kv_cache_dtype=dtype,
            gguf_compute=args.gguf_compute,
            enable_prefix_caching=False,
            max_model_len=WINDOW + NUM_TOKENS,
        ) as llm:
            tokenizer = llm.get_tokenizer()
            windows = [
                tokens[start : start + WINDOW]
                for tokens in map(tokenizer.encode, text_of)
                for start in range(0, len(tokens) - MIN_WINDOW, WINDOW)
            ]
            logprobs, greedy = logprobs_of(llm, windows), greedy_of(llm, windows)
        first = first or (logprobs, greedy)
        less = first[0] - logprobs
        change, error = math.expm1(less.mean()), float(less.std()) / len(less) ** 0.5
        agreed = int((greedy == first[1]).cumprod(-1).sum())
        print(
            f"| {dtype} | {len(logprobs)} | {math.exp(-logprobs.mean()):.3f} "
            f"| {change:+.2%} ± {error:.2%} | {agreed} of {greedy.numel()} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
