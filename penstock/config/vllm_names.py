"""vLLM's options that are not options here, with what to do about each.

Flags, keywords and the YAML file all ask this table, and docs/moving-from-vllm.md shows it. An
option that Penstock has under the same name is not in it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from penstock.protocol.errors import ConfigError, InputError

logger = logging.getLogger(__name__)


class ForeignOption(NamedTuple):
    """One of vLLM's options. `text` is a clause: why it is not needed, or what to do instead."""

    text: str
    neutral: tuple[object, ...] = ()  # values, besides empty ones, that ask for nothing
    switch: bool = False  # on the command line it takes no value


def _switch(text: str) -> ForeignOption:
    return ForeignOption(text, switch=True)


# Accepted, with one line in the log.
NOT_NEEDED = {
    "tokenizer_mode": ForeignOption("the tokenizer is chosen by the model's files", ("auto",)),
    "config_format": ForeignOption("the format is detected", ("auto",)),
    "swap_space": ForeignOption("preempted requests are recomputed, not swapped"),
    "preemption_mode": ForeignOption("preempted requests are recomputed", ("recompute",)),
    "max_seq_len_to_capture": ForeignOption("CUDA graphs do not depend on the sequence length"),
    "max_cudagraph_capture_size": ForeignOption("the sizes of CUDA graphs are chosen"),
    "cuda_graph_sizes": ForeignOption("the sizes of CUDA graphs are chosen"),
    "cudagraph_capture_sizes": ForeignOption("the sizes of CUDA graphs are chosen"),
    "compilation_config": ForeignOption("nothing is compiled with torch.compile"),
    "optimization_level": ForeignOption("nothing is compiled with torch.compile"),
    "performance_mode": ForeignOption("there is one mode", ("balanced",)),
    "disable_custom_all_reduce": _switch("the all-reduce is chosen by size"),
    "disable_cascade_attn": _switch("there is no cascade attention"),
    "use_v2_block_manager": _switch("there is one block manager"),
    "disable_hybrid_kv_cache_manager": _switch("each layer caches only what it reads"),
    "attention_backend": ForeignOption("the kernels are chosen by device and model"),
    "moe_backend": ForeignOption("the kernels are chosen by device and model"),
    "linear_backend": ForeignOption("the kernels are chosen by device and model"),
    "prefix_caching_hash_algo": ForeignOption("the hash is SHA-256", ("sha256",)),
    "prefix_match_unit": ForeignOption("prefixes match by blocks"),
    "prefix_cache_retention_interval": ForeignOption("checkpoints are kept at each block"),
    "mamba_cache_mode": ForeignOption("states are kept at each block", ("none", "align", "all")),
    "mamba_block_size": ForeignOption("the size follows from the layers"),
    "scheduler_reserve_full_isl": _switch("prompts are admitted in chunks"),
    "watermark": ForeignOption("preemption keeps the first request running"),
    "prefill_schedule_interval": ForeignOption("prompts and decodes share each step"),
    "num_scheduler_steps": ForeignOption("steps are planned ahead: see async_scheduling"),
    "multi_step_stream_outputs": _switch("each step's tokens are streamed"),
    "headless": _switch("nodes with a node_rank above 0 serve no API"),
    "stream_interval": ForeignOption("each step's tokens are streamed", (1,)),
    "renderer_num_workers": ForeignOption("templates and tokenizers have worker threads"),
    "enable_server_load_tracking": _switch("/load is always there"),
    "enable_request_id_headers": _switch("X-Request-Id is always sent"),
    "max_parallel_loading_workers": ForeignOption("weights are streamed from memory maps"),
    "safetensors_load_strategy": ForeignOption("weights are streamed from memory maps"),
    "use_tqdm_on_load": _switch("a progress bar is shown on a terminal"),
    "disable_sliding_window": _switch("windows need no special case"),
    "calculate_kv_scales": _switch("the checkpoint's scales are used if it has any"),
    "fully_sharded_loras": _switch("adapters are sharded like their layers"),
    "enable_mfu_metrics": _switch("penstock bench measures utilization"),
    "kv_cache_metrics": _switch("/metrics has the metrics of the KV cache"),
    "collect_detailed_traces": ForeignOption("traces and /metrics have times by phase"),
    "show_hidden_metrics_for_version": ForeignOption("no metric is hidden"),
    "h11_max_incomplete_event_size": ForeignOption("max_request_body_bytes limits requests"),
    "ignore_patterns": ForeignOption("only the files that are needed are downloaded"),
    "enable_lora_bias": _switch("biases of adapters are loaded without it"),
    "disable_uvicorn_access_log": _switch("requests are logged only with access_log"),
    "disable_log_requests": _switch("requests are logged only with enable_log_requests"),
    "max_log_len": ForeignOption("prompts are not logged"),
    "enable_offline_docs": _switch("/docs loads nothing from other hosts"),
    "h11_max_header_count": ForeignOption("headers are limited"),
}

# Accepted with a value that asks for nothing. With any other they are refused, and `text` says what
# to do.
NOT_SUPPORTED = {
    "trust_remote_code": _switch(
        "Penstock runs no code from checkpoints; --model-impl transformers runs what the "
        "transformers package has, and a plugin adds other models (docs/adding-a-model.md)"
    ),
    "task": ForeignOption("use runner and convert", ("auto", "generate")),
    "override_pooler_config": ForeignOption("use pooler_config"),
    "hf_config_path": ForeignOption("put config.json into the model's folder"),
    "hf_token": ForeignOption("log in with `hf auth login`"),
    "code_revision": ForeignOption("Penstock runs no code from checkpoints"),
    "tokenizer_revision": ForeignOption("give tokenizer a folder"),
    "quantization_config": ForeignOption("use quantization, or config.json's own"),
    "model_loader_extra_config": ForeignOption("use load_format"),
    "enable_prompt_embeds": _switch("send prompts as text or token IDs"),
    "enable_sleep_mode": _switch("stop the server: a start takes seconds"),
    "cpu_offload_gb": ForeignOption("quantize the weights, or use more GPUs", (0,)),
    "kv_offloading_size": ForeignOption("raise kv_cache_memory_bytes", (0,)),
    "kv_offloading_backend": ForeignOption("raise kv_cache_memory_bytes", ("native",)),
    "kv_transfer_config": ForeignOption("prefill and decode run in one engine"),
    "ec_transfer_config": ForeignOption("encoders run in the engine"),
    "weight_transfer_config": ForeignOption("restart with the new weights"),
    "kv_cache_dtype_skip_layers": ForeignOption("kv_cache_dtype holds for all layers"),
    "kv_sharing_fast_prefill": _switch("leave it out"),
    "scheduler_cls": ForeignOption("use scheduling_policy"),
    "max_num_partial_prefills": ForeignOption("use long_prefill_token_threshold", (1,)),
    "max_long_partial_prefills": ForeignOption("use long_prefill_token_threshold", (1,)),
    "prefill_context_parallel_size": ForeignOption("use tensor_parallel_size", (1,)),
    "decode_context_parallel_size": ForeignOption("use tensor_parallel_size", (1,)),
    "enable_dbo": _switch("leave it out"),
    "enable_elastic_ep": _switch("leave it out"),
    "all2all_backend": ForeignOption(
        "use enable_expert_parallel: the kind of ranks decides", ("allgather_reducescatter",)
    ),
    "ray_workers_use_nsight": _switch("leave it out"),
    "worker_cls": ForeignOption("leave it out", ("auto",)),
    "worker_extension_cls": ForeignOption("leave it out"),
    "mm_encoder_only": _switch("the language model is always loaded"),
    "default_mm_loras": ForeignOption("name the adapter as the model of the request"),
    "lora_extra_vocab_size": ForeignOption("adapters cannot add tokens", (256,)),
    "long_lora_scaling_factors": ForeignOption("leave it out"),
    "num_speculative_tokens": ForeignOption("use speculative_config.num_speculative_tokens"),
    "speculative_model": ForeignOption("use speculative_config.model"),
    "spec_method": ForeignOption("use speculative_config.method"),
    "spec_model": ForeignOption("use speculative_config.model"),
    "spec_tokens": ForeignOption("use speculative_config.num_speculative_tokens"),
    "structured_outputs_config": ForeignOption(
        "use structured_outputs_backend and reasoning_parser"
    ),
    "guided_decoding_backend": ForeignOption("use structured_outputs_backend", ("auto",)),
    "reasoning_config": ForeignOption("use reasoning_parser"),
    "enable_reasoning": _switch("use reasoning_parser"),
    "tool_parser_plugin": ForeignOption("name a parser of docs/parsers.md in tool_call_parser"),
    "reasoning_parser_plugin": ForeignOption(
        "name a parser of docs/parsers.md in reasoning_parser"
    ),
    "io_processor_plugin": ForeignOption("leave it out"),
    "shutdown_mode": ForeignOption("use shutdown_timeout"),
    "data_parallel_size_local": ForeignOption("use data_parallel_size", (1,)),
    "data_parallel_start_rank": ForeignOption("use data_parallel_size", (0,)),
    "data_parallel_address": ForeignOption("use data_parallel_size"),
    "data_parallel_rpc_port": ForeignOption("use data_parallel_size"),
    "data_parallel_backend": ForeignOption("use data_parallel_size", ("mp",)),
    "data_parallel_hybrid_lb": _switch("start a server per rank, with data_parallel_rank"),
    "data_parallel_external_lb": _switch("start a server per rank, with data_parallel_rank"),
    "data_parallel_multi_port_external_lb": _switch(
        "start a server per rank, with data_parallel_rank"
    ),
    "uvicorn_log_level": ForeignOption("use log_level", ("info",)),
    "enable_log_outputs": _switch("outputs are not logged"),
    "enable_log_deltas": _switch("outputs are not logged"),
    "enable_per_request_metrics": _switch("scrape /metrics"),
    "enable_ssl_refresh": _switch("restart the server for a new certificate"),
    "ssl_cert_reqs": ForeignOption("ssl_ca_certs requires client certificates", (0,)),
    "ssl_ciphers": ForeignOption("use a reverse proxy for other ciphers"),
    "exclude_tools_when_tool_choice_none": _switch("leave tools out of the request"),
    "tokens_only": _switch("use skip_tokenizer_init and prompts of token IDs"),
    "log_config_file": ForeignOption("use log_level and log_format"),
    "grpc": _switch("use HTTP"),
}

# Methods of `LLM` and `AsyncLLM` that Penstock does not have, with what to do instead.
METHODS = {
    "llm_engine": "use config, engine and get_tokenizer()",
    "sleep": "close it and make another: a start takes seconds",
    "wake_up": "close it and make another: a start takes seconds",
    "is_sleeping": "there is no sleep mode",
    "reset_mm_cache": "processed images are kept by their content, and cannot be stale",
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
    "collective_rpc": "the engine is another process, and no code is sent to it: use LLM",
    "apply_model": "the engine is another process, and no code is sent to it: use LLM",
}

# Arguments of methods that are accepted with these values only.
ARGUMENTS = {
    "chat_template_content_format": ForeignOption("set it for the engine", ("auto",)),
    "reset_running_requests": ForeignOption("abort the requests to free their blocks"),
}

SHORT_FLAGS = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-q": "quantization",
    "-O": "optimization_level",
}


def leave_out_foreign(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, by name or by flag, without those of vLLM that ask for nothing here.

    Raises `ConfigError` for one that is not supported, with what to do instead.
    """
    kept = dict(options)
    for name, value in options.items():
        foreign = find_foreign(name)
        if foreign is None:
            continue
        del kept[name]
        if value in (None, False, "", [], {}, ()) or value in foreign.neutral:
            continue
        if _key(name) in NOT_SUPPORTED:
            raise ConfigError(f"{name} is not supported: {foreign.text}")
        logger.info("%s is ignored: %s", name, foreign.text)
    return kept


def find_foreign(name: str) -> ForeignOption | None:
    """vLLM's option of this name or flag, if it is none here."""
    key = _key(name)
    return NOT_NEEDED.get(key) or NOT_SUPPORTED.get(key)


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


def _key(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
