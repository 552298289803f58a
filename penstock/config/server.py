"""How the API is served: where it listens, who may use it, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.engine import coerce
from penstock.config.options import option, options_of
from penstock.protocol.errors import ConfigError

SHORTEST_SILENCE_S = 2.0  # a healthy process may be silent for less, while it waits for a core


@dataclass(frozen=True)
class ServerConfig:
    host: str = option("0.0.0.0", "Address to listen on; 127.0.0.1: this machine alone.")
    port: int = option(8000, "Port to listen on; 0: any that is free.")
    uds: str | None = option(None, "Path of a Unix socket to listen on, in place of a port.")
    api_key: list[str] = option(
        [], "Keys, one of which a client must send; default: anyone may use the API."
    )
    admin_api_key: list[str] = option(
        [],
        "Keys, one of which operators' routes (/reset_prefix_cache) ask for; they open the rest of "
        "the API as well. Default: such routes are as open as the others.",
    )
    share_prefix_cache: bool = option(
        False,
        "Let clients with different API keys share cached prefixes: less to compute, but a client "
        "can find out which prompts others have sent.",
    )
    allowed_origins: list[str] | None = option(
        None,
        "Origins of web pages that may use the API (CORS); *: any. Default: any, or none where "
        "there are API keys.",
    )
    allowed_methods: list[str] = option(["*"], "Methods that such pages may use.")
    allowed_headers: list[str] = option(["*"], "Headers that such pages may send.")
    allow_credentials: bool = option(False, "Let such pages send cookies.")
    ssl_keyfile: str | None = option(None, "Private key for HTTPS, with ssl_certfile.")
    ssl_certfile: str | None = option(None, "Certificate for HTTPS, with ssl_keyfile.")
    ssl_ca_certs: str | None = option(
        None, "Certificates of authorities: clients must then bring one signed by them."
    )
    root_path: str = option("", "Path under which a proxy serves the API, such as /llm.")
    max_request_body_bytes: int = option(
        32 * 2**20, "Largest request body; a larger one gets a 413."
    )
    max_queued_requests: int = option(
        4096,
        "Most completions (prompts times n) that wait for their turn to run; more get a 429.",
    )
    request_timeout_s: float | None = option(
        None, "Most seconds that a request may take, queueing included; default: no limit."
    )
    request_read_timeout_s: float = option(
        60.0, "Seconds in which a request's head and body must arrive; a slower one gets a 408."
    )
    slow_reader_timeout_s: float = option(
        30.0,
        "Seconds in which a client must read 16 KiB of an answer that waits for it; the "
        "connection of a slower one is closed, and its request aborted.",
    )
    stream_start_timeout_s: float = option(
        1.0,
        "Seconds that a stream waits for its first token before its headers are sent; an error "
        "by then has its own HTTP status, a later one is an event of the stream.",
    )
    stream_keep_alive_s: float = option(
        10.0,
        "Seconds of silence, as while a request is queued, after which a stream is sent a comment "
        "(or Anthropic's ping event), so that proxies keep the connection.",
    )
    max_connections: int = option(
        8192, "Most connections that are open at once; more get a 503 and are closed."
    )
    max_n: int = option(128, "Most completions that a request may ask for each prompt.")
    max_prompts: int = option(1024, "Most prompts in one completion request.")
    shutdown_timeout: float = option(
        25.0, "Seconds that requests have to finish in after SIGTERM, SIGINT or SIGHUP."
    )
    restart_engine: bool = option(
        True,
        "Start the engine again when it dies, and go on with its requests; off: the server ends "
        "with it.",
    )
    spare_engine: bool = option(
        True,
        "Keep a process at hand that has imported what an engine needs, so that another one is "
        "there sooner; it takes about 150 MiB.",
    )
    engine_heartbeat_timeout_s: float = option(
        30.0,
        "Seconds without a sign of life after which the engine counts as dead; while it loads a "
        "model, four times as many.",
    )
    step_timeout_s: float = option(
        900.0,
        "Seconds that one step may take before the engine counts as dead; far above what the "
        "slowest machine needs.",
    )
    max_engine_failures: int = option(
        5,
        "Deaths in a row, each soon after a start and without a token, that are followed by "
        "another start; after one more the server ends.",
    )
    max_request_crashes: int = option(
        3, "Times in a row that a request may kill the engine when it runs alone before it fails."
    )
    max_stored_responses: int = option(
        1000,
        "Most responses and conversations that /v1/responses and /v1/conversations keep in memory; "
        "those not used for longest make room, of whoever has the most. 0: none is kept.",
    )
    max_stored_response_bytes: int = option(256 * 2**20, "Most bytes that these may take together.")
    max_stored_response_bytes_per_key: int = option(
        64 * 2**20, "Most bytes of these that may be one API key's, where there are keys."
    )
    max_stored_items: int = option(
        16384, "Most items in a conversation, or in that of a response, that is to be kept."
    )
    tool_server: list[str] = option(
        [],
        "Tool servers whose tools models may call in /v1/responses: URLs of MCP servers, or "
        "host:port for one at http://host:port/sse; commas separate several. Needs the mcp "
        "package (penstock[tools]).",
    )
    tool_call_timeout_s: float = option(60.0, "Most seconds that a call to a tool server may take.")
    max_tool_output_bytes: int = option(
        64 * 2**10, "Most bytes that a model is shown of what a tool answers; the rest is cut off."
    )
    max_tool_rounds: int = option(
        10, "Most times that a model may call tool servers in one response; then it must answer."
    )
    enable_tokenizer_info_endpoint: bool = option(
        True, "Serve /tokenizer_info: the tokenizer's configuration and the chat template."
    )
    return_tokens_as_token_ids: bool = option(
        False,
        "Write tokens in logprobs as token_id:ID, so that those that are no text can be told "
        "apart; a request may say otherwise.",
    )
    enable_force_include_usage: bool = option(
        False, "End every stream with its usage, as stream_options.include_usage asks for."
    )
    enable_prompt_tokens_details: bool = option(
        True,
        "Report prompt_tokens_details (tokens from the prefix cache) in the usage of completions "
        "and chat completions.",
    )
    access_log: bool = option(False, "Log a line for every HTTP request.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}")
        for name in (
            "max_request_body_bytes", "max_n", "max_prompts", "max_request_crashes",
            "max_connections",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "max_stored_response_bytes", "max_stored_response_bytes_per_key", "max_stored_items",
            "max_tool_output_bytes", "max_tool_rounds",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "max_queued_requests", "shutdown_timeout", "max_engine_failures",
            "max_stored_responses", "stream_start_timeout_s",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("engine_heartbeat_timeout_s", "step_timeout_s"):
            if getattr(self, name) < SHORTEST_SILENCE_S:
                raise ConfigError(
                    f"{name} must be at least {SHORTEST_SILENCE_S:g}, got {getattr(self, name)}"
                )
        if self.request_timeout_s is not None and self.request_timeout_s <= 0:
            raise ConfigError(f"request_timeout_s must be above 0, got {self.request_timeout_s}")
        for name in (
            "request_read_timeout_s", "slow_reader_timeout_s", "tool_call_timeout_s",
            "stream_keep_alive_s",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("api_key", "admin_api_key"):
            if not all(getattr(self, name)):
                raise ConfigError(f"{name} must not be empty")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with /, got {self.root_path!r}")
        self._check_tls()

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile need each other: give both or none")
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
