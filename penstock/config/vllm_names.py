"""vLLM's options that are not options here, with what to do about each.

Flags, keywords and the YAML file all ask this table, and docs/moving-from-vllm.md shows it. An
option that Penstock has under the same name is not in it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.protocol.errors import ConfigError

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
    "attention_config": ForeignOption("the kernels are chosen by device and model"),
    "kernel_config": ForeignOption("the kernels are chosen by device and model"),
    "mm_encoder_attn_backend": ForeignOption("the kernels are chosen by device and model"),
    "enable_flashinfer_autotune": _switch("the kernels are chosen by device and model"),
    "expert_placement_strategy": ForeignOption(
        "enable_eplb places experts by their load", ("linear", "round_robin")
    ),
    "distributed_timeout_seconds": ForeignOption("ranks that die or hang are found in any case"),
    "cpu_distributed_timeout_seconds": ForeignOption(
        "ranks that die or hang are found in any case"
    ),
    "disable_nccl_for_dp_synchronization": _switch("replicas do not synchronize over NCCL"),
    "skip_mm_profiling": _switch("encoder_cache_tokens bounds the memory of media"),
    "mm_processor_cache_type": ForeignOption("processed media are in shared memory", ("lru",)),
    "mm_shm_cache_max_object_size_mb": ForeignOption("processed media are in shared memory"),
    "interleave_mm_strings": _switch("templates get media where the messages have them"),
    "disable_chunked_mm_input": _switch("an image is encoded once, wherever its prompt is cut"),
    "pt_load_map_location": ForeignOption("weights are read to the device", ("cpu",)),
    "specialize_active_lora": _switch("one kernel serves any number of adapters"),
    "cudagraph_metrics": _switch("penstock bench measures steps"),
    "enable_logging_iteration_details": _switch("/metrics has the steps' sizes and times"),
    "aggregate_engine_logging": _switch("throughput is logged once for all replicas"),
    "log_error_stack": _switch("the server logs stacks of unexpected errors"),
    "fail_on_environ_validation": _switch("environment variables have no effect on behaviour"),
    "disable_access_log_for_endpoints": ForeignOption("requests are logged only with access_log"),
    "disable_frontend_multiprocessing": _switch("the engine is a process of its own"),
    "tokenizer_pool_size": ForeignOption("templates and tokenizers have worker threads"),
    "scheduler_delay_factor": ForeignOption("prompts are admitted at once"),
    "num_lookahead_slots": ForeignOption("blocks for drafts are allocated"),
    "fingerprint_mode": ForeignOption("system_fingerprint covers the version and the model"),
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
    "ec_manager_config": ForeignOption("encoders run in the engine"),
    "diffusion_config": ForeignOption("models that diffuse text are not supported"),
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
    "disable_async_output_proc": _switch("use --no-async-scheduling"),
    "disable_mm_preprocessor_cache": _switch("use mm_processor_cache_gb=0"),
    "enable_layerwise_nvtx_tracing": _switch("use profiler_config"),
    "numa_bind": _switch("start the server with numactl"),
    "omni": _switch("Penstock generates text only: use vllm-omni"),
    "additional_config": ForeignOption("it is for plugins of other platforms: leave it out"),
    "mamba_ssm_cache_dtype": ForeignOption("states have the model's type", ("auto", "float32")),
    "mamba_cache_dtype": ForeignOption("states have the model's type", ("auto",)),
    "rope_scaling": ForeignOption('use hf_overrides={"rope_scaling": ...}'),
    "rope_theta": ForeignOption('use hf_overrides={"rope_theta": ...}'),
    "num_redundant_experts": ForeignOption("use eplb_config.num_redundant_experts", (0,)),
    "eplb_window_size": ForeignOption("use eplb_config.window_size"),
    "eplb_step_interval": ForeignOption("use eplb_config.step_interval"),
    "eplb_log_balancedness": _switch("/metrics has the balance of experts"),
    "dbo_decode_token_threshold": ForeignOption("leave it out", (32,)),
    "dbo_prefill_token_threshold": ForeignOption("leave it out", (512,)),
    "ubatch_size": ForeignOption("leave it out", (0,)),
    "cp_kv_cache_interleave_size": ForeignOption("use tensor_parallel_size", (1,)),
    "dcp_kv_cache_interleave_size": ForeignOption("use tensor_parallel_size", (1,)),
    "cpu_offload_params": ForeignOption("quantize the weights, or use more GPUs"),
    "offload_backend": ForeignOption("quantize the weights, or use more GPUs", ("auto",)),
    "offload_group_size": ForeignOption("quantize the weights, or use more GPUs", (0,)),
    "offload_num_in_group": ForeignOption("quantize the weights, or use more GPUs", (1,)),
    "offload_prefetch_step": ForeignOption("quantize the weights, or use more GPUs", (1,)),
    "video_pruning_rate": ForeignOption("sample fewer frames with media_io_kwargs", (0,)),
    "logits_processor_pattern": ForeignOption("name the classes in logits_processors"),
    "lora_target_modules": ForeignOption("leave other modules out of the adapter"),
    "enable_tower_connector_lora": _switch("train adapters of the language model"),
    "qlora_adapter_name_or_path": ForeignOption("use lora_modules"),
    "enable_prompt_adapter": _switch("train a LoRA adapter"),
    "max_prompt_adapters": ForeignOption("train a LoRA adapter"),
    "allow_deprecated_quantization": _switch("quantize with penstock quantize"),
    "fault_tolerance_config": ForeignOption("engines that die are restarted in any case"),
}

# Keys of vLLM's options that are objects, where the option is one here, too.
_KERNELS_ARE_CHOSEN = ForeignOption("drop it; the kernels are chosen by device and model")
KEYS = {
    "speculative_config": {
        "disable_by_batch_size": ForeignOption("drop it; adaptive turns drafts down under load"),
        "num_speculative_tokens_per_batch_size": ForeignOption(
            "drop it; adaptive turns drafts down under load"
        ),
        "enable_adaptive_verification": ForeignOption("use adaptive"),
        "tensor_parallel_size": ForeignOption("use draft_tensor_parallel_size"),
        "draft_sample_method": ForeignOption(
            "drop it; drafts are sampled with the request's own noise"
        ),
        "rejection_sample_method": ForeignOption(
            "drop it; a draft holds if the request would have sampled it", ("standard",)
        ),
        "parallel_drafting": ForeignOption("drop it; drafts are proposed one after another"),
        "use_heterogeneous_vocab": ForeignOption("choose a draft model with the same vocabulary"),
        "disable_padded_drafter_batch": ForeignOption("drop it; batches are not padded"),
        "max_model_len": ForeignOption("drop it; drafts end where the drafter's context does"),
        "revision": ForeignOption("give model as a folder of that revision"),
        "code_revision": ForeignOption("drop it; no code is run from checkpoints"),
        "enforce_eager": ForeignOption("use the engine's enforce_eager"),
        "attention_backend": _KERNELS_ARE_CHOSEN,
        "moe_backend": _KERNELS_ARE_CHOSEN,
        "disable_logprobs": ForeignOption("drop it; logprobs are computed if they are asked for"),
    },
    "eplb_config": {
        "log_balancedness": ForeignOption("drop it; /metrics has the balance of experts"),
        "log_balancedness_interval": ForeignOption("drop it; /metrics has the balance of experts"),
        "use_async": ForeignOption("drop it; layers take turns between steps", (True,)),
        "policy": ForeignOption("drop it; there is one policy", ("default",)),
        "communicator": ForeignOption("drop it; the kind of ranks decides"),
    },
    "pooler_config": {
        "task": ForeignOption(
            "use convert; each call names what it wants",
            ("embed", "classify", "token_embed", "token_classify"),
        ),
        "seq_pooling_type": ForeignOption("use pooling_type"),
        "tok_pooling_type": ForeignOption("use pooling_type: ALL", ("ALL",)),
        "normalize": ForeignOption("use use_activation"),
        "softmax": ForeignOption("use use_activation"),
        "activation": ForeignOption("use use_activation"),
        "logit_bias": ForeignOption("drop it; subtract it from the logits"),
        "logit_mean": ForeignOption("drop it; subtract it from the logits"),
        "logit_sigma": ForeignOption("drop it; divide the logits by it"),
    },
    "profiler_config": {
        "torch_profiler_use_gzip": ForeignOption("drop it; traces are not compressed"),
        "torch_profiler_dump_cuda_time_total": ForeignOption("drop it; the trace has all times"),
        "ignore_frontend": ForeignOption("drop it; only ranks are traced", (True,)),
        "delay_iterations": ForeignOption("call start_profile later", (0,)),
        "max_iterations": ForeignOption("call stop_profile earlier", (0,)),
        "warmup_iterations": ForeignOption("call start_profile later", (0,)),
        "active_iterations": ForeignOption("call stop_profile earlier", (0, 5)),
        "wait_iterations": ForeignOption("call start_profile later", (0,)),
    },
}

# Flags of `vllm bench` that penstock bench does not have.
_ARRIVALS = ForeignOption("set the arrivals with --request-rate and --ramp-up-strategy")
_IN_PROCESS = ForeignOption("use bench serve: this command runs its own prompts in this process")
BENCH_FLAGS = {
    "backend": ForeignOption("leave it out: this command runs Penstock's engine in this process"),
    "async_engine": ForeignOption("use bench serve"),
    "dataset": _IN_PROCESS,
    "dataset_name": _IN_PROCESS,
    "dataset_path": _IN_PROCESS,
    "random_input_len": ForeignOption("use --input-len"),
    "random_output_len": ForeignOption("use --output-len"),
    "random_range_ratio": ForeignOption("use --workload"),
    "random_prefix_len": _IN_PROCESS,
    "disable_detokenize": ForeignOption("use --skip-tokenizer-init"),
    "self_timed": _ARRIVALS,
    "probe_request_rate": ForeignOption("run a second bench serve with that rate"),
    "use_beam_search": ForeignOption("use --extra-body '{\"use_beam_search\": true}'"),
    "logprobs_mode": ForeignOption("set it for the server"),
    "hf_name": ForeignOption("download the dataset, and give it as --dataset-path"),
    "hf_split": ForeignOption("download the dataset, and give it as --dataset-path"),
    "hf_subset": ForeignOption("download the dataset, and give it as --dataset-path"),
    "hf_output_len": ForeignOption("use --output-len"),
    "sonnet_input_len": ForeignOption("use --dataset random with --input-len"),
    "sonnet_output_len": ForeignOption("use --dataset random with --output-len"),
    "sonnet_prefix_len": ForeignOption("use --dataset random with --random-prefix-len"),
    "random_batch_size": ForeignOption("each request has one input"),
    "plot_timeline": ForeignOption("use --plot FILE"),
    "plot_dataset_stats": ForeignOption("use --plot FILE"),
    "skip_tokenizer_init": ForeignOption("leave it out: the client has no tokenizer"),
    "lora_assignment": ForeignOption("leave it out: adapters are drawn at random"),
}
BENCH_BACKENDS = {
    "vllm-chat": "use openai-chat",
    "vllm-pooling": "use openai-embeddings, or penstock bench throughput with the model",
    "vllm-rerank": "use penstock bench throughput with the model",
    "openai-embeddings-chat": "use openai-embeddings",
    "openai-embeddings-clip": "use openai-embeddings",
    "openai-embeddings-vlm2vec": "use openai-embeddings",
    "infinity-embeddings": "use openai-embeddings with --endpoint /embeddings",
    "infinity-embeddings-clip": "use openai-embeddings with --endpoint /embeddings",
    "openai-audio": "the server takes no audio",
    "tgi": "use openai: TGI has /v1/completions, too",
    "sglang": "use openai: SGLang has /v1/completions, too",
}

SHORT_FLAGS = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-pcp": "prefill_context_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-r": "node_rank",
    "-asc": "api_server_count",
    "-sc": "speculative_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-dc": "diffusion_config",
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
        if _asks_nothing(value, foreign):
            continue
        if _key(name) in NOT_SUPPORTED:
            raise ConfigError(f"{name} is not supported: {foreign.text}")
        logger.info("%s is ignored: %s", name, foreign.text)
    return kept


def leave_out_keys(given: Mapping[str, Any], table: Mapping[str, ForeignOption]) -> dict[str, Any]:
    """`given`, the keys of an option, without those of vLLM that ask for nothing here.

    Raises `ConfigError` for the others of `table`, with what to do instead.
    """
    for key in given.keys() & table.keys():
        if not _asks_nothing(given[key], table[key]):
            raise ConfigError(f"{key} is not a key: {table[key].text}")
    return {key: value for key, value in given.items() if key not in table}


def _asks_nothing(value: object, foreign: ForeignOption) -> bool:
    empty: tuple[object, ...] = (None, False, "", [], {}, ())
    if isinstance(value, Mapping) and all(item in (*empty, "auto") for item in value.values()):
        return True
    return value in empty or value in foreign.neutral


def find_foreign(name: str) -> ForeignOption | None:
    """vLLM's option of this name or flag, if it is none here."""
    key = _key(name)
    return NOT_NEEDED.get(key) or NOT_SUPPORTED.get(key)


def _key(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
