"""The real default model against transformers, on real text.

default_model_greedy.json has what transformers generates greedily from the same file, on floats.
To read that file takes transformers longer than all of these tests take.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import Reference

from penstock import LLM, SamplingParams
from penstock.config import LoadConfig, ModelConfig
from penstock.loading.source import resolve_source
from penstock.protocol.errors import InputError
from penstock.text.gguf_tokenizer import gguf_tokenizer

RECORDED: dict[str, Any] = json.loads(
    Path(__file__).with_name("default_model_greedy.json").read_text()
)
PROMPTS = list(RECORDED["greedy"])
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(default_model: str) -> LLM:
    return LLM(default_model, gguf_compute="dequantize", max_model_len=1024, cpu_threads=1)


def test_twenty_prompts_give_transformers_tokens_batched_and_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
    batched = llm.generate(PROMPTS, params, use_tqdm=False)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS[::4]]
    num_ties = 0
    for prompt, output in zip([*PROMPTS, *PROMPTS[::4]], [*batched, *alone], strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "length"
        assert answer.logprobs is not None
        recorded = RECORDED["greedy"][prompt]
        assert len(recorded) == 32
        for own, other, row in zip(answer.token_ids, recorded, answer.logprobs, strict=True):
            if own != other:  # what follows differs, too
                assert row[own].logprob - row[other].logprob < 1e-3
                num_ties += 1
                break
    assert num_ties <= 2


@pytest.mark.slow
def test_transformers_still_generates_what_was_recorded(default_model: str) -> None:
    source = resolve_source(ModelConfig(model=default_model), LoadConfig())
    assert source.gguf is not None
    tokenizer = gguf_tokenizer(source.gguf.metadata)
    reference = Reference(source.path.parent, gguf_file=source.path.name)
    for prompt, tokens in RECORDED["greedy"].items():
        reference.count_near_ties(tokenizer.encode(prompt).ids, tokens)


def test_a_conversation_is_answered_and_ends_by_itself(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text
    assert output.prompt is not None
    assert output.prompt.startswith("<|im_start|>system")


def test_a_stream_of_deltas_adds_up_to_the_whole(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[-1], GREEDY, use_tqdm=False)[0].outputs[0]
    from penstock import RequestOutputKind

    params = SamplingParams(
        temperature=0, max_tokens=32, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    pieces = [output.outputs[0] for output in llm.stream(PROMPTS[-1], params)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert len(pieces) > 20


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, stop=["9 10 1"])
    output = llm.generate("1 2 3 4 5 6 7", params, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "stop"
    assert output.stop_reason == "9 10 1"
    assert output.text == " 8 "


def test_bad_words_do_not_appear(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, bad_words=["Paris"])
    output = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]
    assert "Paris" not in output.text


def test_the_checkpoint_is_found_where_the_source_says(default_model: str) -> None:
    source = resolve_source(ModelConfig(model=default_model), LoadConfig())
    assert Path(source.path).stat().st_size == 98_362_432


def test_a_template_given_with_the_call_is_used(llm: LLM, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}"
    file = tmp_path / "template.jinja"
    file.write_text(template)
    for given in (template, str(file)):
        (output,) = llm.chat(
            [{"role": "user", "content": "1 2 3 4 5"}],
            SamplingParams(temperature=0, max_tokens=4),
            chat_template=given,
            use_tqdm=False,
        )
        assert output.prompt == "1 2 3 4 5"
        assert output.outputs[0].text == " 6 7"


def test_what_is_no_conversation_is_refused(llm: LLM) -> None:
    message = {"role": "user", "content": "Hi"}
    not_conversations: list[Any] = [None, "Hi", message, iter([message]), [message, [message]]]
    for messages in not_conversations:
        with pytest.raises(InputError, match="messages"):
            llm.chat(messages, use_tqdm=False)
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(InputError, match=f"chat_template_kwargs must not contain {name}"):
            llm.chat([message], use_tqdm=False, chat_template_kwargs={name: []})


def test_a_chat_offline_can_be_read_into_messages(default_model: str) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
            },
        },
    }
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(default_model, max_model_len=1024, cpu_threads=1) as llm:
        (called,) = llm.chat(
            messages, params, tools=[tool], tool_choice="required", parse_output=True,
            use_tqdm=False,
        )  # fmt: skip
        (said,) = llm.chat(messages, params, parse_output=True, use_tqdm=False)
        (raw,) = llm.chat(messages, params, use_tqdm=False)
        choice = {"type": "function", "function": {"name": "nothing"}}
        with pytest.raises(InputError, match="tool_choice names 'nothing'"):
            llm.chat(messages, params, tools=[tool], tool_choice=choice, parse_output=True)
        with pytest.raises(InputError, match=r"tools\[0\] must be"):
            llm.chat(messages, params, tools=[{"name": "f"}], parse_output=True)
    message = called.outputs[0].message
    assert message is not None
    (call,) = message.tool_calls
    assert (call.name, call.complete) == ("get_weather", True)
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert said.outputs[0].message is not None
    assert said.outputs[0].message.content == said.outputs[0].text == raw.outputs[0].text
    assert raw.outputs[0].message is None
