"""vLLM's request fields and parameters that are not fields here, with what to do about each.

Bodies of requests and the parameter classes ask this table, and docs/moving-from-vllm.md shows it.
A name may be a field of one request and not of another: the table is asked about names that the
request at hand does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import msgspec

from penstock.protocol.errors import InputError

_EMPTY: tuple[object, ...] = (False, "", [], {})


class ForeignField(NamedTuple):
    """One of vLLM's fields. `text` is a clause: why it is not needed, or what to do instead."""

    text: str
    neutral: tuple[object, ...] = _EMPTY  # values, besides None, that ask for nothing


_STRUCTURED = "use structured_outputs: {}"
_ONE_ENGINE = "prefill and decode run in one engine"

# Ignored: the output is the same without.
NOT_NEEDED = {
    "user": ForeignField("API keys tell users apart"),
    "metadata": ForeignField("it is not stored"),
    "session_id": ForeignField("the header X-Session-ID keeps a session on one replica"),
    "request_id": ForeignField("the header X-Request-Id sets it"),
    "prompt_cache_key": ForeignField("prefixes are found by their content"),
    "service_tier": ForeignField("there is one tier"),
    "stream_interval": ForeignField("each step's tokens are streamed"),
    "routed_experts_prompt_start": ForeignField("the experts of the whole prompt are returned"),
    "is_3d_lora_weight": ForeignField("the layout is read from the file"),
    "skip_clone": ForeignField("parameters are copied where they are changed"),
    "early_stopping": ForeignField("beam search stops when no better sequence is possible"),
}

# Refused, with what to do instead, unless the value asks for nothing.
NOT_SUPPORTED = {
    "guided_json": ForeignField(_STRUCTURED.format('{"json": SCHEMA}'), ()),  # {} is a schema
    "guided_regex": ForeignField(_STRUCTURED.format('{"regex": PATTERN}')),
    "guided_choice": ForeignField(_STRUCTURED.format('{"choice": [TEXT, ...]}')),
    "guided_grammar": ForeignField(_STRUCTURED.format('{"grammar": GRAMMAR}')),
    "guided_json_object": ForeignField(_STRUCTURED.format('{"json_object": true}')),
    "guided_whitespace_pattern": ForeignField(
        _STRUCTURED.format('{"whitespace_pattern": PATTERN, ...}')
    ),
    "guided_decoding_backend": ForeignField("set structured_outputs_backend of the engine"),
    "guided_decoding": ForeignField("use structured_outputs=StructuredOutputsParams(...)"),
    "structured_outputs": ForeignField(
        "in responses use text.format, in messages output_config.format"
    ),
    "prompt_embeds": ForeignField("send the prompt as text or token IDs"),
    "logits_processors": ForeignField("set logits_processors of the engine"),
    "repetition_detection": ForeignField("leave it out, or limit max_tokens"),
    "kv_transfer_params": ForeignField(_ONE_ENGINE),
    "ec_transfer_params": ForeignField(_ONE_ENGINE),
    "return_prompt_text": ForeignField("use return_token_ids and /detokenize"),
    "return_token_offsets": ForeignField("use logprobs: completions return text_offset"),
    "return_assistant_tokens_mask": ForeignField("leave it out"),
    "include_reasoning": ForeignField("leave reasoning items out of the output", (*_EMPTY, True)),
    "enable_response_messages": ForeignField("use return_token_ids of chat completions"),
    "previous_input_messages": ForeignField("use previous_response_id"),
    "endianness": ForeignField("base64 output is little-endian", (*_EMPTY, "native", "little")),
    "truncation_side": ForeignField("pairs are cut at the end", (*_EMPTY, "right")),
    "flat_logprobs": ForeignField("logprobs are a list with a dictionary per token"),
    "skip_reading_prefix_cache": ForeignField("give the prompt a cache_salt of its own"),
    "trace_decode_token_ids": ForeignField("leave it out"),
    "best_of": ForeignField("use n", (*_EMPTY, 1)),
    "use_beam_search": ForeignField("use LLM.beam_search, or chat completions"),
    "length_penalty": ForeignField("use BeamSearchParams, or chat completions", (*_EMPTY, 1)),
    "truncate_prompt_tokens": ForeignField("cut the prompt's token IDs"),
    "step_tag_id": ForeignField("set pooler_config of the engine"),
    "returned_token_ids": ForeignField("set pooler_config of the engine"),
    "extra_kwargs": ForeignField("leave it out"),
}

_NO_GRAMMAR = "beam search follows no grammar: use SamplingParams(structured_outputs=...)"

# What to do instead in a class where that is something else.
BY_OWNER: Mapping[str, Mapping[str, str]] = {
    "BeamSearchParams": {
        "structured_outputs": _NO_GRAMMAR,
        **{name: _NO_GRAMMAR for name in NOT_SUPPORTED if name.startswith("guided_")},
        "best_of": "use beam_width",
        "logits_processors": "beams are chosen by the model's own probabilities: leave it out",
    },
}

CLASSES = {
    "GuidedDecodingParams": "use StructuredOutputsParams",
    "CompilationLevel": "nothing is compiled with torch.compile: leave it out",
    "CompilationMode": "nothing is compiled with torch.compile: leave it out",
    "CUDAGraphMode": "use enforce_eager=True to do without CUDA graphs",
    "VllmConfig": "use EngineArgs",
    "ModelRegistry": "a plugin adds models (docs/adding-a-model.md)",
    "EmbedsPrompt": "send prompts as text or token IDs",
    "ExplicitEncoderDecoderPrompt": "models with an encoder beside a decoder are not supported",
    "SamplingType": "temperature=0 is greedy",
    "RequestOutputCollector": "use AsyncLLM.generate",
    "AsyncEngineDeadError": "use EngineDeadError of penstock.protocol.errors",
    "AsyncStream": "use AsyncLLM.generate, which is an asynchronous generator",
    "run_server": "use penstock serve",
    "build_app": "use penstock serve",
    "current_platform": "use torch.cuda.is_available()",
    "destroy_model_parallel": "use close() of the LLM",
    "destroy_distributed_environment": "use close() of the LLM",
    "initialize_ray_cluster": "use distributed_executor_backend='ray'",
    "init_distributed_environment": "the engine starts its ranks",
    "initialize_model_parallel": "the engine starts its ranks",
    "get_world_group": "use LLM.get_world_size",
    "get_tensor_model_parallel_rank": "use LLM.collective_rpc",
    "get_tensor_model_parallel_world_size": "use LLM.get_world_size",
    "encode_video_url": "give frames as a numpy array as multi_modal_data",
    "fetch_video": 'use video_url in messages, or give {"video": frames} as multi_modal_data',
    "fetch_audio": "no model here takes audio",
    "encode_audio_base64": "no model here takes audio",
    "encode_audio_url": "no model here takes audio",
    "convert_image_mode": "use the method convert of Pillow's images",
    "fetch_image": "use that of penstock.multimodal.utils",
    "ImageMediaIO": "use the images of Pillow",
    "MultiModalDataDict": "use a dict of images and videos",
    "MULTIMODAL_REGISTRY": "use a model of docs/vision.md",
    "LogitsProcessor": "subclass penstock.runner.logits_processors.LogitsProcessor, which has the "
    "methods add, remove and apply",
    "AdapterLogitsProcessor": "subclass penstock.runner.logits_processors.LogitsProcessor",
    "BatchUpdate": "subclass penstock.runner.logits_processors.LogitsProcessor",
    "MoveDirectionality": "subclass penstock.runner.logits_processors.LogitsProcessor",
}


def refuse_class(module: str, name: str) -> NoReturn:
    """Raise the error for a name that is not in a module, with what to do if vLLM has it."""
    if name in CLASSES:
        raise ImportError(f"{name} is not in Penstock: {CLASSES[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def leave_out_foreign_fields(given: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """`given` without the fields of vLLM that ask for nothing. The class `owner` has none of these.

    Raises `InputError` for one that is not supported, with what to do instead.
    """
    kept = dict(given)
    for name, value in given.items():
        if name not in NOT_NEEDED and name not in NOT_SUPPORTED:
            continue
        del kept[name]
        field = NOT_SUPPORTED.get(name)
        if field is None or value is None or value in field.neutral:
            continue
        text = BY_OWNER.get(owner, {}).get(name, field.text)
        raise InputError(f"{name} is not supported here: {text}", name)
    return kept


class ParamsMeta(type(msgspec.Struct)):  # type: ignore[misc]
    """The metaclass of parameter classes. They accept vLLM's keywords that ask for nothing."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError:  # perhaps an unknown keyword
            own = cls.__struct_fields__
            unknown = {name: value for name, value in fields.items() if name not in own}
            left = leave_out_foreign_fields(unknown, cls.__name__)
            if len(left) == len(unknown):
                raise
            known = {name: fields[name] for name in fields.keys() - unknown.keys()}
            return super().__call__(*args, **known, **left)
