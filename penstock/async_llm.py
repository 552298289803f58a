"""AsyncLLM: the asynchronous entry point. Runs a model in another process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.config import EngineConfig
from penstock.config.vllm_methods import refuse_arguments, refuse_method
from penstock.engine.arg_utils import EngineArgs
from penstock.engine.async_client import AsyncEngineClient
from penstock.engine.ledger import DeltaStream
from penstock.engine.lora_requests import LoRARequests, with_adapter
from penstock.engine.outputs import outputs_of, start_engine
from penstock.engine.pooled import pooling_output
from penstock.observability.logs import setup_logging
from penstock.protocol.adapter import Adapter, LoRARequest
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import ConfigError, EngineDeadError, InputError, RequestFault
from penstock.protocol.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from penstock.protocol.pooling import PoolingParams
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams
from penstock.text.frontend import Frontend, PreparedRequest
from penstock.text.pooling import (
    InputOptions,
    InputTruncation,
    join_pieces,
    pooling_info,
    prepare_pieces,
    read_pooling_prompt,
)
from penstock.text.prompts import (
    Prompt,
    TokenizationKwargs,
    read_media,
    read_options,
    read_prompt,
)
from penstock.text.user_tokenizer import UserTokenizer


class AsyncLLM:
    """Loads a model in another process and runs concurrent requests on it.

    `model` and the keywords are the engine options of the configuration reference. As with the
    server, an engine that dies is restarted and its requests continue. Use it as an asynchronous
    context manager, or call `start` and `close`. The first request starts the engine, too. Use one
    instance from one event loop.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = model
        self.config = EngineConfig.from_options(options)
        setup_logging(self.config.observability.log_level, self.config.observability.log_format)
        self._client = AsyncEngineClient()
        self._starting: asyncio.Task[None] | None = None  # or started
        self._was_started = False
        self._frontend: Frontend | None = None  # set once the model is loaded
        self._lora_requests = LoRARequests(self.config.lora)
        self._ids = itertools.count()
        self._children: dict[str, list[str]] = {}  # engine ids by the caller's id
        self._early_aborts: set[str] = set()  # requests aborted while being prepared

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        return cls(**dataclasses.asdict(engine_args))

    async def start(self) -> None:
        """Load the model. Raises the engine's error if that fails."""
        if self._starting is not None:
            raise ConfigError("the engine is running already: close it first")
        self._was_started = True
        self._starting = starting = asyncio.ensure_future(self._start())
        try:
            await starting
        except BaseException:
            if self._starting is starting:
                self._starting = None
                raise
        if self._starting is not starting:
            raise EngineDeadError("the engine was closed while it was starting")

    async def _ensure_started(self) -> None:
        """Start the engine with the first request, as scripts for vLLM expect."""
        if self._starting is None and not self._was_started:
            await self.start()
        elif self._starting is not None and not self._starting.done():
            await asyncio.shield(self._starting)

    async def _start(self) -> None:
        self._client.spawn(self.config)
        try:
            self.config, _, self._frontend = await start_engine(self._client, self.config)
        except BaseException:
            await self._client.close()
            raise

    async def close(self) -> None:
        """Stop the engine, even while it starts. Unfinished requests get `EngineDeadError`."""
        if self._frontend is not None and self._frontend.media is not None:
            self._frontend.media.close()
        starting, self._starting, self._frontend = self._starting, None, None
        if starting is None:
            return
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        else:
            await self._client.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def shutdown(self) -> None:
        """Stop the engine at once. Unfinished requests get `EngineDeadError`."""
        if self._frontend is not None and self._frontend.media is not None:
            self._frontend.media.close()
        starting, self._starting, self._frontend = self._starting, None, None
        if starting is not None:
            starting.cancel()
            self._client.kill()

    def __getattr__(self, name: str) -> Any:
        refuse_method("AsyncLLM", name)

    @property
    def frontend(self) -> Frontend:
        if self._frontend is None:
            raise ConfigError("the engine is not running: `await llm.start()` first")
        return self._frontend

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tokenization_kwargs: TokenizationKwargs = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one prompt. `output_kind` sets what each output holds.

        `tokenization_kwargs` may contain `add_special_tokens`. `trace_headers` are not needed: only
        the server writes traces.

        Leaving the loop early aborts the request, as does `abort`. Raises `InputError` for an
        invalid request, `AdapterError` for a path without an adapter. A request that fails while it
        runs has the finish reason "error".
        """

        options = read_options(tokenization_kwargs, None)

        def prepare(frontend: Frontend, own_id: str) -> PreparedRequest:
            text, cache_salt = read_prompt(prompt)
            params = sampling_params or self.get_default_sampling_params()
            return frontend.prepare(
                own_id,
                text,
                params,
                add_special_tokens=options.add_special_tokens,
                priority=priority,
                cache_salt=cache_salt,
                media=read_media(prompt),
            )

        return self._run(prepare, request_id, lora_request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for a conversation. `template_options` go to the chat template."""
        from penstock.conversation.media import take_media  # `generate` needs none of it

        def prepare(frontend: Frontend, own_id: str) -> PreparedRequest:
            params = sampling_params or self.get_default_sampling_params()
            taken, media = take_media(frontend, messages)
            prompt = frontend.render_chat(taken, **template_options)
            return frontend.prepare(own_id, prompt, params, add_special_tokens=False, media=media)

        return self._run(prepare, request_id, lora_request)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tokenization_kwargs: TokenizationKwargs = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Pool one prompt with a pooling model, as `LLM.encode` does.

        Cancelling it aborts the request. Raises `InputError` for an invalid request, and
        `RequestFault` if it was aborted. An output that failed has an `error`.
        """
        params = pooling_params or PoolingParams()
        given, cache_salt = read_pooling_prompt(prompt)
        truncation = InputTruncation(truncate_prompt_tokens)
        special = read_options(tokenization_kwargs, None).add_special_tokens
        options = InputOptions(truncation, special, priority, cache_salt)
        await self._ensure_started()
        frontend = self.frontend
        with self._registered(request_id) as (request_id, own_id):
            prepared = await asyncio.to_thread(
                prepare_pieces, frontend, own_id, given, params, options
            )
            pieces = with_adapter(prepared.pieces, await self._adapter_of(lora_request))
            ended: dict[str, EngineDelta] = {}
            with contextlib.closing(self._submit(request_id, pieces)) as stream:
                async for deltas in stream:
                    ended |= {item.request_id: item for item in deltas if item.finish_reason}
        ordered = [ended[piece.request_id] for piece in pieces if piece.request_id in ended]
        if len(ordered) < len(pieces) or any(
            item.finish_reason is FinishReason.ABORT for item in ordered
        ):
            raise RequestFault(f"request {request_id} was aborted")
        delta = join_pieces(pooling_info(frontend), params, pieces, ordered)
        output = pooling_output(pieces, delta)
        output.request_id = request_id
        return output

    async def _run(
        self,
        prepare: Callable[[Frontend, str], PreparedRequest],
        request_id: str | None,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self._ensure_started()
        frontend = self.frontend
        with self._registered(request_id) as (request_id, own_id):
            prepared = await asyncio.to_thread(prepare, frontend, own_id)
            children = with_adapter(prepared.children, await self._adapter_of(lora_request))
            with contextlib.closing(self._submit(request_id, children)) as stream:
                async for _, output in outputs_of(stream, [prepared]):
                    output.request_id = request_id
                    yield output

    async def _adapter_of(self, given: LoRARequest | None) -> Adapter | None:
        """Find an adapter, and load it if it was never loaded, so that errors come early."""
        if given is None:
            return None
        adapter = await asyncio.to_thread(self._lora_requests.find, given)
        if adapter is not None and adapter.digest not in self._lora_requests.loaded:
            with contextlib.suppress(EngineDeadError):  # the next engine loads it for the request
                await self._client.call("load_adapter", adapter)
                self._lora_requests.loaded.add(adapter.digest)
        return adapter

    @contextlib.contextmanager
    def _registered(self, request_id: str | None) -> Iterator[tuple[str, str]]:
        """Keep a request abortable meanwhile. Yields the caller's id for it and the engine's."""
        number = next(self._ids)
        if request_id is None:
            request_id = f"request-{uuid.uuid4().hex}"
        if request_id in self._children:
            raise InputError(f"request_id {request_id!r} is running already", "request_id")
        self._children[request_id] = []
        try:
            # The engine never sees an id twice: late outputs of an aborted request must not reach
            # a new request with the same id.
            yield request_id, f"{request_id}@{number}"
        finally:
            del self._children[request_id]
            self._early_aborts.discard(request_id)

    def _submit(self, request_id: str, requests: Sequence[EngineRequest]) -> DeltaStream:
        """Send what a request consists of to the engine; the caller closes the stream."""
        stream = self._client.submit(requests)
        children = [request.request_id for request in requests]
        self._children[request_id] = children
        if request_id in self._early_aborts:
            self._client.abort(children)
        return stream

    async def abort(self, request_id: str) -> None:
        """Abort a request. Its generator ends after the outputs so far. Unknown ids are ignored."""
        children = self._children.get(request_id)
        if children:
            self._client.abort(children)
        elif children is not None:
            self._early_aborts.add(request_id)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache, as `LLM.reset_prefix_cache` does."""
        refuse_arguments(reset_running_requests=reset_running_requests)
        await self._call("reset_prefix_cache")
        return True

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start the torch profiler. Requires `profiler_config`. Traces' names get the prefix."""
        await self._call("start_profile", profile_prefix)

    async def stop_profile(self) -> None:
        """Stop the profiler and write its trace, one file per rank."""
        await self._call("stop_profile")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before its first request. Always returns True."""
        await self._ensure_started()
        await self._adapter_of(lora_request)
        return True

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is gone and will not be restarted."""
        if not self.is_running:
            raise EngineDeadError("the engine is not running")

    async def _call(self, method: str, *args: Any) -> None:
        if not self.is_running:
            raise ConfigError("the engine is not running: `await llm.start()` first")
        await self._client.call(method, *args)

    def get_tokenizer(self) -> UserTokenizer:
        """The tokenizer, with the methods that users of Hugging Face's call.

        Also before the engine is started, when it is loaded at the first call.
        """
        frontend = self._frontend or self._own_frontend
        return UserTokenizer(frontend.get_tokenizer(), frontend)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the defaults from the model's generation_config.json."""
        return msgspec.structs.replace((self._frontend or self._own_frontend).default_params)

    @functools.cached_property
    def _own_frontend(self) -> Frontend:
        """A frontend without an engine."""
        from penstock.loading.speculators import find_model  # with the model's files

        config, source = find_model(self.config)
        return Frontend(config.model, source, max_model_len=0, chat=config.chat)

    @property
    def is_running(self) -> bool:
        return self._frontend is not None and not self._client.is_lost
