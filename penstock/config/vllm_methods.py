"""vLLM's methods and arguments of methods that are not here, with what to do about each.

`LLM` and `AsyncLLM` ask these tables, and docs/moving-from-vllm.md shows that of methods.
"""

from __future__ import annotations

from typing import NoReturn

from penstock.config.vllm_names import ForeignOption
from penstock.protocol.errors import InputError

# Methods of `LLM` and `AsyncLLM` that Penstock does not have, with what to do instead.
METHODS = {
    "llm_engine": "use config, engine and get_tokenizer()",
    "sleep": "close it and make another: a start takes seconds",
    "wake_up": "close it and make another: a start takes seconds",
    "is_sleeping": "there is no sleep mode",
    "reset_mm_cache": "processed images are kept by their content, and cannot be stale",
    "reset_encoder_cache": "encoded images are kept by their content, and cannot be stale",
    "enqueue_chat": "use chat, or get_tokenizer().apply_chat_template and enqueue",
    "errored": "use is_running, or check_health()",
    "dead_error": "use check_health(), which raises it",
    "is_stopped": "use is_running",
    "is_paused": "there is no pause: stop sending requests",
    "pin_lora": "raise max_loras, or max_cpu_loras to keep more adapters in memory",
    "update_weight_version": "close it and make another with the new weights",
    "weight_info": "close it and make another with the new weights",
    "init_weight_transfer_engine": "close it and make another with the new weights",
    "start_weight_update": "close it and make another with the new weights",
    "update_weights": "close it and make another with the new weights",
    "finish_weight_update": "close it and make another with the new weights",
    "pause_generation": "stop sending requests",
    "resume_generation": "send requests again",
    "remove_lora": "adapters that are not used make room for others",
    "list_loras": "any number of adapters can be named in requests",
    "scale_elastic_ep": "use penstock serve and penstock replicas",
    "do_log_stats": "penstock serve logs throughput",
    "model_config": "use config.model",
    "get_model_config": "use config.model",
    "vllm_config": "use config",
    "get_vllm_config": "use config",
    "set_tokenizer": "set the option tokenizer",
    "renderer": "use chat, or get_tokenizer().apply_chat_template",
    "preprocess_chat": "use chat, or get_tokenizer().apply_chat_template",
    "input_processor": "give prompts to generate: it processes them",
    "output_processor": "generate returns outputs",
    "engine_core": "use engine",
    "supported_tasks": "use config.pooling: the model's architecture decides",
    "get_supported_tasks": "use config.pooling: the model's architecture decides",
    "default_sampling_params": "use get_default_sampling_params()",
    "rerank": "use score",
    "add_logger": "penstock serve logs throughput, and /metrics has what it counts",
    "start_background_loop": "the first request starts the engine",
    "wait_for_requests_to_drain": "wait for the generators of the requests",
    "is_tracing_enabled": "only penstock serve writes traces",
    "collective_rpc": "the engine is another process, and no code is sent to it: use LLM",
    "apply_model": "the engine is another process, and no code is sent to it: use LLM",
}

# Arguments of methods that are accepted with these values only.
ARGUMENTS = {
    "chat_template": ForeignOption(
        "set score_template in pooler_config, a text with {query} and {document}"
    ),
    "chat_template_content_format": ForeignOption("set it for the engine", ("auto",)),
    "reset_running_requests": ForeignOption("abort the requests to free their blocks"),
}


def refuse_method(owner: str, name: str) -> NoReturn:
    """Raise the AttributeError for a method, with what to do instead if vLLM has it."""
    hint = f": {METHODS[name]}" if name in METHODS else ""
    raise AttributeError(f"{owner} has no {name!r}{hint}")


def refuse_arguments(**given: object) -> None:
    """Raise `InputError` for arguments of a method that ask for something, with what to do."""
    for name, value in given.items():
        if value and value not in ARGUMENTS[name].neutral:
            text = ARGUMENTS[name].text
            raise InputError(f"{name}={value!r:.80} is not supported here: {text}", name)
