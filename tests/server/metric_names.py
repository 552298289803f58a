"""The metrics of vLLM (August 2026), without its prefix, and why some do not apply here."""

from __future__ import annotations

GAUGES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "engine_sleep_state",
    "lora_requests_info",
    "cache_config_info",
]
COUNTERS = [
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "mm_cache_queries",
    "mm_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
    "corrupted_requests",
    "tool_call_parser_invocations",
    "estimated_flops_per_gpu",
    "estimated_read_bytes_per_gpu",
    "estimated_write_bytes_per_gpu",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
]
HISTOGRAMS = [
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prefill_kv_computed_tokens",
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
]
# Bounds of buckets that dashboards select by `le`.
FIRST_TOKEN_BOUNDS = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
]  # fmt: skip
TOKEN_BOUNDS = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
]  # fmt: skip
REQUEST_BOUNDS = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
]  # fmt: skip
BOUNDS = {
    "time_to_first_token_seconds": FIRST_TOKEN_BOUNDS,
    "inter_token_latency_seconds": TOKEN_BOUNDS,
    "request_time_per_output_token_seconds": TOKEN_BOUNDS,
    "e2e_request_latency_seconds": REQUEST_BOUNDS,
    "request_queue_time_seconds": REQUEST_BOUNDS,
    "request_inference_time_seconds": REQUEST_BOUNDS,
    "request_prefill_time_seconds": REQUEST_BOUNDS,
    "request_decode_time_seconds": REQUEST_BOUNDS,
}
LABELS = {  # besides model_name and engine
    "num_requests_waiting_by_reason": {"reason"},
    "cache_config_info": {"block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks"},
    "lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "prompt_tokens_by_source": {"source"},
    "request_success": {"finished_reason"},
    "tool_call_parser_invocations": {"mode", "outcome", "request_type"},
    "spec_decode_num_accepted_tokens_per_pos": {"position"},
}
WITHOUT_ENGINE = {
    "tool_call_parser_invocations",  # in vLLM, too
    "mm_cache_queries",  # counted in API processes
    "mm_cache_hits",
}
DO_NOT_APPLY = {
    "engine_sleep_state": "there is no sleep mode",
    "external_prefix_cache_queries": "there is no external KV cache",
    "external_prefix_cache_hits": "there is no external KV cache",
    "corrupted_requests": "opt-in there: a check for NaN in the logits of every step",
    "estimated_flops_per_gpu": "opt-in there: penstock plan estimates them",
    "estimated_read_bytes_per_gpu": "opt-in there: penstock plan estimates them",
    "estimated_write_bytes_per_gpu": "opt-in there: penstock plan estimates them",
    "kv_block_lifetime_seconds": "opt-in there: a sample of the blocks",
    "kv_block_idle_before_evict_seconds": "opt-in there: a sample of the blocks",
    "kv_block_reuse_gap_seconds": "opt-in there: a sample of the blocks",
}
# Of the FastAPI instrumentator and of the Prometheus client.
OTHERS = [
    "http_requests_total",
    "http_request_duration_seconds_bucket",
    "http_request_size_bytes_sum",
    "http_response_size_bytes_sum",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
]
