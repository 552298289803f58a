"""vLLM's routes that are none here, with what to do instead. docs/moving-from-vllm.md shows it."""

from __future__ import annotations

_TEXT_ONLY = "transcribe the audio first: this server takes text, images and videos"
_NO_SLEEP = "stop the server: a start takes seconds"
_DRAIN = "use /replicas/{replica}/drain and /replicas/{replica}/restart"
_WEIGHTS = "use /replicas/rolling_restart with the folder of the new weights"
_ABORT = "close the connection of a request to abort it"
_FRESH = "processed images are kept by their content, and cannot be stale"
_RECOVERY = "engines that die are restarted, and GET /replicas shows them"

ROUTES = {
    "/v1/audio/transcriptions": _TEXT_ONLY,
    "/v1/audio/translations": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/cohere/v2/chat": "use /v1/chat/completions",
    "/cohere/v2/embed": "use /v2/embed",
    "/generative_scoring": "use /v1/completions with max_tokens 1 and logprob_token_ids",
    "/inference/v1/generate": "use /v1/completions with token IDs and return_token_ids",
    "/v1/chat/completions/render": "use /tokenize with messages",
    "/v1/chat/completions/derender": "use /detokenize",
    "/v1/completions/render": "use /tokenize",
    "/v1/completions/derender": "use /detokenize",
    "/tokenizer_info": "start the server with --enable-tokenizer-info-endpoint",
    "/redoc": "use /docs",
    "/readyz": "use /ready",
    "/abort_requests": _ABORT,
    "/scale_elastic_ep": "use POST /replicas",
    "/is_scaling_elastic_ep": "use GET /replicas",
    "/fault_tolerance/apply": _RECOVERY,
    "/fault_tolerance/status": _RECOVERY,
    "/sleep": _NO_SLEEP,
    "/wake_up": _NO_SLEEP,
    "/is_sleeping": _NO_SLEEP,
    "/pause": _DRAIN,
    "/resume": _DRAIN,
    "/is_paused": "use GET /replicas",
    "/reset_mm_cache": _FRESH,
    "/reset_encoder_cache": _FRESH,
    "/collective_rpc": "use LLM.collective_rpc: no code is sent to a server",
    "/server_info": "use /version and /v1/models",
    "/get_world_size": "use GET /replicas",
    "/init_weight_transfer_engine": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/start_draft_weight_update": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/finish_weight_update": _WEIGHTS,
    "/update_weight_version": _WEIGHTS,
    "/weight_info": "use GET /replicas",
    "/generate": "use /v1/completions",
}


def why_nothing(path: str) -> str:
    """The message of a 404."""
    if path in ROUTES:
        return f"there is no {path} here: {ROUTES[path]}"
    return f"there is nothing at {path}; /docs lists what there is"
