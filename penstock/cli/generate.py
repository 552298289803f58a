"""`penstock generate`: completes prompts. Only the text goes to standard output."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.common import (
    DEFAULT_MAX_TOKENS,
    add_prompts_argument,
    check,
    open_llm,
    read_prompts,
    text_options,
)
from penstock.config.cli import add_engine_arguments, add_sampling_arguments, override
from penstock.protocol.sampling import OutputKind, SamplingParams

if TYPE_CHECKING:
    from penstock.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts_argument(parser)
    add_engine_arguments(parser)
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)


def run(args: argparse.Namespace) -> int:
    options, sampling = text_options(args)
    prompts = read_prompts(args.prompts)
    with open_llm(options) as llm:
        params = override(llm.get_default_sampling_params(), sampling)
        if len(prompts) == 1 and params.n == 1:
            stream_one(llm, prompts[0], params)
        else:
            print_all(llm, prompts, params)
    return 0


def stream_one(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Stream the completion."""
    for output in llm.stream(prompt, override(params, {"output_kind": OutputKind.DELTA})):
        print(check(output).outputs[0].text, end="", flush=True)
    print()


def print_all(llm: LLM, prompts: list[str], params: SamplingParams) -> None:
    """Print the completions of all prompts in order, each followed by a newline."""
    for output in llm.generate(prompts, params):
        for completion in check(output).outputs:
            print(completion.text)
