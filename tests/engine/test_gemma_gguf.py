"""A real GGUF file with a SentencePiece vocabulary, Gemma 3 270M in Q4_K_M, on real text.

gemma3_270m.json has what llama.cpp and transformers make of the same file, with their versions:
llama.cpp's tokens of awkward strings, and what each generates greedily. llama.cpp computes on
blocks with activations of 8 bits, transformers on floats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import Reference

from penstock import LLM, SamplingParams
from penstock.config import LoadConfig, ModelConfig
from penstock.loading.source import ModelSource, resolve_source
from penstock.text.gguf_tokenizer import gguf_tokenizer

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("gemma3_270m.json").read_text())
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
# How far the token that another engine chose may be behind the best here, in log-probability.
# Both of transformers' and of this engine's floats: rounding. Of 8-bit activations: measured 0.26.
FLOATS, EIGHT_BITS = 1e-3, 0.5


@pytest.fixture(scope="module")
def source(gemma_model: str) -> ModelSource:
    return resolve_source(ModelConfig(model=gemma_model), LoadConfig())


@pytest.fixture(scope="module")
def llm(source: ModelSource) -> Iterator[LLM]:
    options: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "kv_cache_dtype": "float32"}
    with LLM(
        str(source.path), gguf_compute="dequantize", max_model_len=128, cpu_threads=1, **options
    ) as llm:
        yield llm


def test_awkward_strings_have_the_tokens_that_llama_cpp_gives_them(source: ModelSource) -> None:
    assert source.gguf is not None
    tokenizer = gguf_tokenizer(source.gguf.metadata)
    strings = RECORDED["llama.cpp"]["tokens"]
    assert len(strings) == 60
    encoded = tokenizer.encode_batch(list(strings), add_special_tokens=False)
    assert {text: own.ids for text, own in zip(strings, encoded, strict=True)} == strings
    for text, own in zip(strings, encoded, strict=True):
        # A space is written ▁ in the vocabulary, so that the two cannot be told apart.
        assert tokenizer.decode(own.ids, skip_special_tokens=False) == text.replace("▁", " ")
    assert tokenizer.encode("x").ids[0] == 2  # <bos>


@pytest.mark.parametrize(("engine", "limit"), [("transformers", FLOATS), ("llama.cpp", EIGHT_BITS)])
def test_what_others_generate_from_the_file_is_likeliest_here(
    llm: LLM, engine: str, limit: float
) -> None:
    greedy = RECORDED[engine]["greedy"]
    prompts = [llm.get_tokenizer().encode(prompt) for prompt in greedy]
    texts = [
        {"prompt_token_ids": [*prompt, *tokens]}
        for prompt, tokens in zip(prompts, greedy.values(), strict=True)
    ]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for output, prompt in zip(llm.generate(texts, params, use_tqdm=False), prompts, strict=True):
        assert output.prompt_logprobs is not None
        assert output.prompt_token_ids is not None
        for position in range(len(prompt), len(output.prompt_token_ids)):
            found = output.prompt_logprobs[position]
            assert found is not None
            own = found[output.prompt_token_ids[position]].logprob
            assert max(each.logprob for each in found.values()) - own < limit


def test_blocks_as_they_are_give_text_that_floats_give_too(llm: LLM, source: ModelSource) -> None:
    prompts = ["def fibonacci(n):\n", "Water boils at"]  # where nothing comes close
    with LLM(str(source.path), max_model_len=128, kv_cache_memory_bytes=64 << 20) as native:
        own = native.generate(prompts, GREEDY, use_tqdm=False)
    theirs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in own] == [
        output.outputs[0].text for output in theirs
    ]
    assert "if n == 0:" in own[0].outputs[0].text
    assert "100 degrees Celsius" in own[1].outputs[0].text


def test_turns_in_gemmas_template_are_special_tokens_after_one_beginning(llm: LLM) -> None:
    template = (
        "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n"
        "{{ message.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    messages = [{"role": "user", "content": "Hello, world!"}]
    params = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.chat(messages, params, use_tqdm=False, chat_template=template)
    bos, start, end, newline = 2, 105, 106, 107
    hello = RECORDED["llama.cpp"]["tokens"]["Hello, world!"]
    user, model = (llm.get_tokenizer().encode(role)[1] for role in ("user", "model"))
    turn = [start, user, newline, *hello, end, newline]
    assert output.prompt_token_ids == [bos, *turn, start, model, newline]
    assert llm.get_tokenizer().end_ids == {1, end}


@pytest.mark.slow
def test_transformers_still_generates_what_was_recorded(source: ModelSource) -> None:
    assert source.gguf is not None
    tokenizer = gguf_tokenizer(source.gguf.metadata)
    reference = Reference(source.path.parent, gguf_file=source.path.name)
    for prompt, tokens in RECORDED["transformers"]["greedy"].items():
        reference.count_near_ties(tokenizer.encode(prompt).ids, tokens)
