"""What scripts written for vLLM import and call."""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import importlib
import inspect
import json
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from server.server_process import make_tiny_model
from tiny_engine import OPTIONS, open_llm
from tiny_vision import picture

import penstock
from penstock import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from penstock.protocol.errors import ConfigError, InputError
from penstock.utils import FlexibleArgumentParser, random_uuid
from penstock.v1.metrics.reader import Counter


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("penstock", "LLM AsyncLLM EngineArgs AsyncEngineArgs SamplingParams TextPrompt"),
        ("penstock.sampling_params", "SamplingParams BeamSearchParams StructuredOutputsParams"),
        ("penstock.pooling_params", "PoolingParams"),
        ("penstock.outputs", "RequestOutput CompletionOutput EmbeddingRequestOutput"),
        ("penstock.inputs", "TextPrompt TokensPrompt"),
        ("penstock.lora.request", "LoRARequest"),
        ("penstock.engine.arg_utils", "EngineArgs AsyncEngineArgs"),
        ("penstock.engine.llm_engine", "LLMEngine"),
        ("penstock.v1.engine.llm_engine", "LLMEngine"),
        ("penstock.inputs.data", "TextPrompt TokensPrompt"),
    ],
)
def test_names_are_where_vllms_scripts_look_for_them(module: str, names: str) -> None:
    found = importlib.import_module(module)
    for name in names.split():
        assert getattr(found, name) is getattr(penstock, name)


# Arguments of vLLM's methods. Those before `|` may be given by position.
CALLS: dict[type, dict[str, str]] = {
    LLM: {
        "generate": "prompts sampling_params use_tqdm | lora_request priority tokenization_kwargs "
        "mm_processor_kwargs",
        "chat": "messages sampling_params use_tqdm | lora_request chat_template "
        "chat_template_content_format add_generation_prompt continue_final_message tools "
        "chat_template_kwargs tokenization_kwargs mm_processor_kwargs",
        "enqueue": "prompts sampling_params lora_request priority | tokenization_kwargs "
        "mm_processor_kwargs",
        "wait_for_completion": "| use_tqdm",
        "beam_search": "prompts params lora_request use_tqdm concurrency_limit |",
        "encode": "prompts pooling_params | use_tqdm lora_request pooling_task "
        "truncate_prompt_tokens tokenization_kwargs",
        "score": "data_1 data_2 | use_tqdm pooling_params truncate_prompt_tokens lora_request "
        "tokenization_kwargs chat_template",
        "get_world_size": "include_dp |",
        "collective_rpc": "method timeout args kwargs |",
        "apply_model": "func |",
        "start_profile": "profile_prefix |",
        "stop_profile": "|",
        "reset_prefix_cache": "reset_running_requests reset_connector |",
        "get_metrics": "|",
        "get_tokenizer": "|",
        "get_default_sampling_params": "|",
    },
    LLMEngine: {
        "add_request": "request_id prompt params arrival_time lora_request tokenization_kwargs "
        "trace_headers priority |",
        "abort_request": "request_ids |",
    },
    AsyncLLM: {
        "generate": "prompt sampling_params request_id | lora_request tokenization_kwargs "
        "trace_headers priority",
        "encode": "prompt pooling_params request_id | lora_request trace_headers priority "
        "truncate_prompt_tokens tokenization_kwargs",
        "abort": "request_id |",
        "add_lora": "lora_request |",
        "start_profile": "profile_prefix |",
        "reset_prefix_cache": "reset_running_requests reset_connector |",
    },
}


@pytest.mark.parametrize(
    ("owner", "method"), [(owner, name) for owner, calls in CALLS.items() for name in calls]
)
def test_methods_take_vllms_arguments(owner: type, method: str) -> None:
    by_position, by_name = CALLS[owner][method].split("|")
    parameters = inspect.signature(getattr(owner, method)).parameters
    positional = [
        name for name, item in parameters.items() if item.kind is item.POSITIONAL_OR_KEYWORD
    ]
    assert positional[1 : 1 + len(by_position.split())] == by_position.split()
    assert set(by_name.split()) <= parameters.keys()


def test_arguments_that_ask_for_nothing_are_accepted(tiny_llama: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    with open_llm(tiny_llama) as llm:
        nothing: dict[str, Any] = {"tokenization_kwargs": None, "mm_processor_kwargs": {}}
        (output,) = llm.generate({"prompt_token_ids": [4, 5]}, params, False, **nothing)
        assert len(output.outputs[0].token_ids) == 2
        assert llm.reset_prefix_cache(False, False)


def test_progress_is_shown_on_terminals_only(
    tiny_llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_llm(tiny_llama) as llm:
        llm.generate({"prompt_token_ids": [4, 5]}, SamplingParams(max_tokens=2), use_tqdm=True)
    assert "Generating" not in capsys.readouterr().err


def test_arguments_that_are_not_supported_say_what_to_do(tiny_llama: str) -> None:
    with open_llm(tiny_llama) as llm:
        with pytest.raises(InputError, match="reset_running_requests=True is not supported here"):
            llm.reset_prefix_cache(reset_running_requests=True)
        with pytest.raises(InputError, match="got 'max_length': to do more, tokenize with"):
            llm.generate("a", tokenization_kwargs={"max_length": 4})
        with pytest.raises(InputError, match="add_special_tokens must be bool, got 3"):
            llm.generate("a", tokenization_kwargs={"add_special_tokens": 3})
        with pytest.raises(InputError, match="chat_template_content_format='openai' is not"):
            llm.chat([], chat_template_content_format="openai")


def test_special_tokens_can_be_left_out_of_a_prompt(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<end>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<end>": {"id": "<end>", "ids": [256], "tokens": ["<end>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    params = SamplingParams(max_tokens=1)
    options = {"load_format": "dummy", "skip_tokenizer_init": False}
    with open_llm(folder, **options) as llm:
        (whole,) = llm.generate("ab", params, False)
        (bare,) = llm.generate("ab", params, tokenization_kwargs={"add_special_tokens": False})
        assert whole.prompt_token_ids == [256, *bare.prompt_token_ids]


def test_engine_args_make_an_engine(tiny_llama: str) -> None:
    args = EngineArgs(tiny_llama, skip_tokenizer_init=True, max_model_len=32, swap_space=4)
    assert args.max_model_len == 32
    assert args.max_num_seqs is None
    assert dataclasses.asdict(args)["block_size"] == 16
    with LLM.from_engine_args(args) as llm:
        assert llm.engine.limits.max_model_len == 32
    assert isinstance(AsyncLLM.from_engine_args(AsyncEngineArgs(tiny_llama)), AsyncLLM)


def test_engine_args_come_from_a_command_line() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = parser.parse_args(["--model", "m", "--max-model-len", "8k", "-tp", "2"])
    made = EngineArgs.from_cli_args(args)
    assert (made.model, made.max_model_len, made.tensor_parallel_size) == ("m", 8000, 2)


def test_the_namespace_of_flags_has_every_option() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model="m", runner="pooling")
    args = parser.parse_args(["--swap-space", "4", "--served-model-name", "a"])
    assert (args.model, args.tensor_parallel_size, args.served_model_name) == ("m", 1, ["a"])
    assert (args.trust_remote_code, args.swap_space, args.task) == (False, 4, None)
    kept = vars(args)
    del kept["data_parallel_size"]
    made = EngineArgs("m", runner="pooling", served_model_name=["a"])
    assert EngineArgs(**kept) == EngineArgs.from_cli_args(args) == made
    with pytest.raises(ConfigError, match="trust_remote_code is not supported"):
        EngineArgs.from_cli_args(parser.parse_args(["--trust-remote-code"]))


def test_flags_of_a_script_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("max-model-len: 77\nmax-num-seqs: 5\n")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--config", str(tmp_path / "a.yaml"), "--max-num-seqs", "3"])
    made = EngineArgs(**vars(args))
    assert (made.max_model_len, made.max_num_seqs) == (77, 3)


def test_engine_args_refuse_what_an_engine_would() -> None:
    with pytest.raises(ConfigError, match="trust_remote_code is not supported"):
        EngineArgs("m", trust_remote_code=True)
    with pytest.raises(ConfigError, match="unknown option 'max_modle_len'"):
        EngineArgs("m", max_modle_len=5)


def test_a_clone_of_sampling_parameters_is_changed_alone() -> None:
    params = SamplingParams(stop=["a"], max_tokens=5)
    clone = params.clone()
    assert clone == params
    clone.max_tokens = 6
    assert isinstance(clone.stop, list)
    clone.stop.append("b")
    assert (params.max_tokens, params.stop) == (5, ["a"])


def test_prompts_may_be_typed_dictionaries(tiny_llama: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    with open_llm(tiny_llama) as llm:
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=[4, 5, 6]), params, use_tqdm=False)
        (same,) = llm.generate([4, 5, 6], params, use_tqdm=False)
        several = llm.generate([[4, 5, 6], [7]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    assert same.outputs == several[0].outputs == output.outputs
    assert several[1].prompt_token_ids == [7]


def test_a_prompt_says_which_of_vllms_kinds_are_not_supported(tiny_llama: str) -> None:
    import torch

    wrong = pytest.raises(InputError, match="got 'prompt_embeds': send the prompt as text or")
    with open_llm(tiny_llama) as llm, wrong:
        llm.generate({"prompt_embeds": torch.zeros(2, 4)})


def test_an_async_llm_has_its_tokenizer_before_it_is_started(tmp_path: Path) -> None:
    llm = AsyncLLM(str(make_tiny_model(tmp_path)), load_format="dummy")

    async def awaited() -> list[int]:
        tokenizer: Any = await llm.get_tokenizer()  # as in vLLM's older releases
        return tokenizer.encode("abc")

    assert asyncio.run(awaited()) == llm.get_tokenizer().encode("abc")
    assert llm.get_default_sampling_params() == SamplingParams()
    assert not llm.is_running


def test_an_adapter_has_vllms_names() -> None:
    adapter = LoRARequest("sql", 3, "/adapters/sql")
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("sql", 3, "/adapters/sql")


def test_classes_of_options_are_dictionaries_of_them() -> None:
    from penstock.config import CompilationConfig, KVTransferConfig, PoolerConfig

    pooler = PoolerConfig(pooling_type="CLS", task="embed")
    made = EngineArgs("m", pooler_config=pooler, compilation_config=CompilationConfig(mode=3))
    assert made.pooler_config == {"pooling_type": "CLS", "task": "embed"}
    with pytest.raises(ConfigError, match="kv_transfer_config is not supported: prefill and"):
        EngineArgs("m", kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector"))
    with pytest.raises(ConfigError, match="pooler_config: normalize is not a key: use use_act"):
        EngineArgs("m", pooler_config=PoolerConfig(normalize=True))


def test_images_are_fetched_and_sent_in_urls(tmp_path: Path) -> None:
    from penstock.multimodal.utils import encode_image_url, fetch_image

    picture(5, 4).save(tmp_path / "a.png")
    image = fetch_image((tmp_path / "a.png").as_uri())
    assert (image.mode, image.size) == ("RGB", (5, 4))
    assert fetch_image(encode_image_url(image)).tobytes() == image.tobytes()


def test_vectors_are_printed_by_their_first_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.utils.print_utils import print_embeddings

    print_embeddings([0.5] * 6)
    print_embeddings([2], prefix="Reward")
    shown = "Embeddings: [0.5, 0.5, 0.5, 0.5, ...] (size=6)\nReward: [2] (size=1)\n"
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_methods_that_only_vllm_has_say_what_to_do(kind: type) -> None:
    instance = kind.__new__(kind)
    assert not hasattr(instance, "wake_up")
    with pytest.raises(AttributeError, match="has no 'wake_up': close it and make another"):
        instance.wake_up()


def test_what_was_not_asked_for_is_refused_with_what_to_ask_for(tiny_llama: str) -> None:
    with open_llm(tiny_llama) as llm:
        with pytest.raises(ConfigError, match="disable_log_stats=False"):
            llm.get_metrics()
        with pytest.raises(InputError, match="the profiler is off: set profiler_config="):
            llm.start_profile()
    with pytest.raises(ConfigError, match="profiler_config: torch_profiler_dir must name a folder"):
        EngineArgs("m", profiler_config={"profiler": "torch"})


def test_an_aborted_request_gives_no_more_outputs(tiny_llama: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLMEngine(tiny_llama, **OPTIONS, disable_log_stats=False) as engine:
        for name in ("kept", "aborted"):
            engine.add_request(name, {"prompt_token_ids": [1, 2, 3]}, params)
        engine.abort_request("aborted")
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert {output.request_id for output in outputs} == {"kept"}
        assert outputs[-1].finished
        ended = {
            metric.labels["finished_reason"]: metric.value
            for metric in engine.get_metrics()
            if metric.name == "penstock:request_success" and isinstance(metric, Counter)
        }
        assert ended == {"stop": 0, "length": 1, "abort": 1, "error": 0}


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        ("penstock.config", "CompilationMode", "nothing is compiled with torch.compile"),
        ("penstock.multimodal.image", "convert_image_mode", "use the method convert of Pillow"),
        ("penstock.multimodal", "MULTIMODAL_REGISTRY", "use a model of docs/vision.md"),
        ("penstock.v1.sample.logits_processor", "LogitsProcessor", "has the methods add, remove"),
        ("penstock.sampling_params", "GuidedDecodingParams", "use StructuredOutputsParams"),
    ],
)
def test_a_class_that_only_vllm_has_says_what_to_do(module: str, name: str, remedy: str) -> None:
    with pytest.raises(ImportError, match=f"{name} is not in Penstock: .*{remedy}"):
        exec(f"from {module} import {name}")
    assert not hasattr(importlib.import_module(module), "unheard_of")


def test_small_helpers_are_where_scripts_look_for_them() -> None:
    from penstock.inputs import PromptType
    from penstock.logprobs import Logprob, PromptLogprobs, SampleLogprobs

    prompt: PromptType = "a"
    given: SampleLogprobs = [{1: Logprob(-0.5)}]
    first: PromptLogprobs = [None, *given]
    assert (prompt, len(first)) == ("a", 2)
    assert random_uuid() != random_uuid()
    optional = SamplingParams.from_optional(temperature=None, top_p=0.5, stop=None)
    assert optional == SamplingParams(top_p=0.5)


def test_the_servers_older_module_starts_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "penstock.entrypoints.openai.api_server", raising=False)
    monkeypatch.setattr("sys.argv", ["api_server", "--model", "m", "--trust-remote-code"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("penstock.entrypoints.openai.api_server", run_name="__main__")
    assert ended.value.code == 2
    assert "--trust-remote-code is not supported" in capsys.readouterr().err


def test_outputs_have_the_attributes_of_vllms() -> None:
    output = RequestOutput("1", None, [1], [], finished=True)
    assert output.encoder_prompt is None
    assert output.kv_transfer_params is None
    with pytest.raises(AttributeError, match="no 'lora_request': it is the one that you gave"):
        output.lora_request  # noqa: B018
    assert copy.deepcopy(output) == pickle.loads(pickle.dumps(output)) == output


def test_a_parser_takes_underscores_in_flags() -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    assert parser.parse_args(["--max_model_len=8k"]).max_model_len == 8000
