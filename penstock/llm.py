"""LLM: the entry point for offline use. Runs a model in this process."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from tqdm import tqdm

from penstock.config import EngineConfig
from penstock.config.vllm_methods import refuse_arguments
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.engine.heap import settled_heap
from penstock.engine.lora_requests import LoRARequestOrList, LoRARequests, with_adapters
from penstock.engine.operating import OperatingMethods
from penstock.engine.pooled import PoolingMethods
from penstock.engine.searched import SearchMethods
from penstock.loading.speculators import find_model
from penstock.observability.logs import setup_logging
from penstock.protocol.adapter import Adapter, LoRARequest
from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import ConfigError, InputError
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import OutputKind, SamplingParams
from penstock.runner.drafter import Drafter
from penstock.runner.logits_processors import LogitsProcessor
from penstock.text.collector import OutputCollector
from penstock.text.frontend import Frontend, PreparedRequest, open_media
from penstock.text.prompts import (
    RENDERED,
    TEXT,
    Prompt,
    PromptOptions,
    TokenizationKwargs,
    is_tokens,
    read_media,
    read_options,
    read_prompt,
    with_priorities,
)
from penstock.text.templates import read_chat_template
from penstock.text.user_tokenizer import UserTokenizer

if TYPE_CHECKING:
    from penstock.engine.arg_utils import EngineArgs
    from penstock.media.content import MediaContent

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]


class LLM(PoolingMethods, SearchMethods, OperatingMethods):
    """Loads a model and generates from it, or pools with it.

    `model` and the keywords are the engine options of the configuration reference. The Python API
    follows vLLM's where they overlap. `logits_processors` are classes or module:Class strings.
    `drafter` proposes tokens for speculative decoding. Use it as a context manager, or call
    `close`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        logits_processors: str | Sequence[str | type[LogitsProcessor]] = (),
        drafter: Drafter | None = None,
        **options: Any,
    ) -> None:
        if model is not None:
            options["model"] = model
        if isinstance(logits_processors, str):
            logits_processors = [logits_processors]
        named = [item for item in logits_processors if isinstance(item, str)]
        if named:
            options["logits_processors"] = named
        config = EngineConfig.from_options(options)
        if config.parallel.num_engines > 1:
            raise ConfigError(
                "LLM runs one engine in this process: drop data_parallel_size, or use AsyncLLM, "
                "penstock run-batch or penstock serve, which run replicas"
            )
        setup_logging(config.observability.log_level, config.observability.log_format)
        self.config, source = find_model(config)
        classes = [item for item in logits_processors if not isinstance(item, str)]
        self.engine: EngineCore = build_engine(self.config, source, classes, drafter)
        # The caller is trusted: its chat templates are allowed.
        chat = dataclasses.replace(self.config.chat, trust_request_chat_template=True)
        self.frontend = Frontend(self.config.model, source, self.engine.limits.max_model_len, chat)
        self.frontend.pooling = self.engine.executor.capabilities.pooling
        open_media(self.frontend, self.config.media, source, self.engine.limits)
        self._ids = itertools.count()
        self._collector = OutputCollector()
        self._lora_requests = LoRARequests(self.config.lora)
        self._queued: list[PreparedRequest] = []
        # As in vLLM, offline requests are only counted if this is asked for.
        if options.get("disable_log_stats") is False:
            from penstock.engine.offline_metrics import OfflineMetrics  # and prometheus_client

            self._metrics = OfflineMetrics(self.config, self.engine, self.frontend.media)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        return cls(**dataclasses.asdict(engine_args))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequestOrList = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: TokenizationKwargs = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt. Outputs are in the order of the prompts.

        `lora_request` is the LoRA adapter of all prompts, or a list with one or None for each.
        `priority` applies with scheduling_policy="priority": lower runs first.
        `tokenization_kwargs` may contain `add_special_tokens`. `mm_processor_kwargs` are for the
        processor of images and videos, below those of a prompt.
        Raises `InputError` before anything runs if a request is invalid. A request that fails
        while it runs has the finish reason "error". The other requests are not affected.
        """
        options = read_options(tokenization_kwargs, mm_processor_kwargs)
        requests = self._prepare_all(prompts, sampling_params, lora_request, priority, options)
        return self._run(requests, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequestOrList = None,
        priority: Sequence[int] | None = None,
        *,
        tokenization_kwargs: TokenizationKwargs = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts for `wait_for_completion`. Returns their request IDs."""
        options = read_options(tokenization_kwargs, mm_processor_kwargs)
        requests = self._prepare_all(prompts, sampling_params, lora_request, priority, options)
        self._submit(requests)
        self._queued += requests
        return [request.request_id for request in requests]

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete the queued prompts. Outputs are in the order of the prompts."""
        requests, self._queued = self._queued, []
        return self._wait(requests, use_tqdm)

    def _prepare_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequestOrList,
        priority: Sequence[int] | None,
        options: PromptOptions,
    ) -> list[PreparedRequest]:
        items = with_priorities(prompts, priority)
        params = self._params_for(len(items), sampling_params)
        adapters = self._adapters_of(lora_request, len(items))
        requests = [
            self._prepare(item, own, options, priority=order)
            for (item, order), own in zip(items, params, strict=True)
        ]
        return with_adapters(requests, adapters)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequestOrList = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: TokenizationKwargs = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parse_output: bool = False,
    ) -> list[RequestOutput]:
        """Answer one or more conversations. Keywords of `generate` have the same meaning.

        `chat_template` (a Jinja file or the template itself) replaces the model's own. `tools` are
        passed to the template. Outputs hold the raw text, including tool calls and reasoning.

        With `parse_output`, each output also has a `message` with separate content, reasoning and
        tool calls, as in the chat APIs. An output that ends with calls has the finish reason
        "tool_calls". `tool_choice` is then "none", "auto", "required" or
        {"function": {"name": ...}}.
        """
        from penstock.conversation.media import take_media  # `generate` needs none of these
        from penstock.conversation.output import join_steps
        from penstock.conversation.prepare import check_template_kwargs, prepare_turn
        from penstock.conversation.request import (
            MediaOptions,
            RunOptions,
            TurnRequest,
            read_tool_choice,
            read_tools,
        )

        self.frontend.check_generates()  # before it lacks a chat template
        if chat_template_content_format != self.config.chat.chat_template_content_format:
            refuse_arguments(chat_template_content_format=chat_template_content_format)
        options = read_options(tokenization_kwargs, mm_processor_kwargs, RENDERED)
        media_options = MediaOptions(mm_processor_kwargs)
        several = _is_list(messages) and bool(messages) and _is_list(messages[0])
        conversations: Sequence[Any] = messages if several else [messages]
        params = self._params_for(len(conversations), sampling_params)
        adapters = self._adapters_of(lora_request, len(conversations))
        template = None if chat_template is None else read_chat_template(chat_template)
        template_kwargs = chat_template_kwargs or {}
        check_template_kwargs(template_kwargs)
        if tool_choice != "auto" and not parse_output:
            raise InputError(
                "tool_choice is for messages that are parsed: set parse_output, or leave it out",
                "tool_choice",
            )
        if parse_output:
            offered, choice = read_tools(tools or ()), read_tool_choice(tool_choice)
            turns = [
                prepare_turn(
                    self.frontend,
                    TurnRequest(
                        conversation,
                        msgspec.structs.replace(own, output_kind=OutputKind.FINAL_ONLY),
                        offered,
                        choice,
                        template_kwargs=template_kwargs,
                        chat_template=template,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        options=RunOptions(options.add_special_tokens),
                        media=media_options,
                    ),
                    str(next(self._ids)),
                )
                for conversation, own in zip(conversations, params, strict=True)
            ]
            requests = with_adapters([turn.request for turn in turns], adapters)
            outputs = self._run(requests, use_tqdm)
            for turn, output in zip(turns, outputs, strict=True):
                for step in turn.reader.steps(output):
                    item = output.outputs[step.index]
                    item.message = join_steps([step]).message
                    item.finish_reason = step.finish_reason
            return outputs
        taken = [take_media(self.frontend, each, media_options) for each in conversations]
        prompts = [
            self.frontend.render_chat(
                conversation,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **template_kwargs,
            )
            for conversation, _ in taken
        ]
        prepared = [
            self._prepare(prompt, own, options, media=media)
            for prompt, own, (_, media) in zip(prompts, params, taken, strict=True)
        ]
        return self._run(with_adapters(prepared, adapters), use_tqdm)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Stream the outputs of one prompt or conversation.

        `output_kind` sets what each output holds. Leaving the loop early aborts the request.
        """
        (params,) = self._params_for(1, sampling_params)
        if isinstance(prompt, (str, Mapping)) or is_tokens(prompt):
            request = self._prepare(prompt, params, keep_kind=True)
        else:
            from penstock.conversation.media import take_media

            messages, media = take_media(self.frontend, prompt)
            text = self.frontend.render_chat(messages)
            request = self._prepare(text, params, RENDERED, keep_kind=True, media=media)
        (request,) = with_adapters([request], self._adapters_of(lora_request, 1))
        try:
            self._submit([request])
            while True:
                output = request.assembler.take()
                if output is not None:
                    yield output  # other calls may advance this request meanwhile
                elif request.assembler.finished:
                    return
                else:
                    self._step()
        finally:
            self._withdraw([request])

    def get_tokenizer(self) -> UserTokenizer:
        """The tokenizer, with the methods that users of Hugging Face's call."""
        return UserTokenizer(self.frontend.get_tokenizer(), self.frontend)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the defaults from the model's generation_config.json."""
        return msgspec.structs.replace(self.frontend.default_params)

    def close(self) -> None:
        """Free the model's memory and stop worker processes."""
        self.engine.close()
        if self.frontend.media is not None:
            self.frontend.media.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- running requests

    def _adapters_of(self, given: LoRARequestOrList, count: int) -> list[Adapter | None]:
        return self._lora_requests.load(given, count, self.engine, self._step)

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or not all(
            isinstance(item, SamplingParams) for item in given
        ):
            raise InputError(
                f"sampling_params must be SamplingParams, or a list of them, got {given!r:.80}",
                "sampling_params",
            )
        if len(given) != count:
            raise InputError(
                f"sampling_params must be one, or one per prompt ({count}), got {len(given)}",
                "sampling_params",
            )
        return given

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: PromptOptions = TEXT,
        *,
        priority: int = 0,
        keep_kind: bool = False,
        media: Sequence[MediaContent] = (),
    ) -> PreparedRequest:
        if not keep_kind:
            params = msgspec.structs.replace(params, output_kind=OutputKind.FINAL_ONLY)
        text, cache_salt = read_prompt(prompt)
        return self.frontend.prepare(
            str(next(self._ids)),
            text,
            params,
            add_special_tokens=options.add_special_tokens,
            priority=priority,
            cache_salt=cache_salt,
            media=media or read_media(prompt, options.processor_kwargs),
        )

    def _run(self, requests: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        self._submit(requests)
        return self._wait(requests, use_tqdm)

    def _wait(self, requests: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Run steps until these requests, which were submitted, are finished."""
        unfinished = {request.request_id: request for request in requests}
        outputs: dict[str, RequestOutput] = {}
        num_tokens = 0
        bar = tqdm(total=len(requests), desc="Generating", disable=None if use_tqdm else True)
        with bar as progress, settled_heap():
            changed: Sequence[PreparedRequest] = requests  # some may have ended beside others
            try:
                while unfinished:
                    for request in changed:
                        if request.request_id not in unfinished:
                            continue  # it belongs to an open stream
                        output = request.assembler.take()
                        if output is None or not output.finished:
                            continue
                        outputs[request.request_id] = output
                        del unfinished[request.request_id]
                        num_tokens += sum(len(item.token_ids) for item in output.outputs)
                        elapsed = progress.format_dict["elapsed"] or 1e-9
                        progress.set_postfix_str(f"{num_tokens / elapsed:.0f} tok/s", refresh=False)
                        progress.update()
                    changed = self._step() if unfinished else ()
            finally:
                self._withdraw(unfinished.values())
        return [outputs[request.request_id] for request in requests]

    def _submit(self, requests: Sequence[PreparedRequest]) -> None:
        """Give requests to the engine, all or none."""
        try:
            for request in requests:
                self._collector.add(request)
                for child in request.children:
                    self.engine.add(child)
                    if self._metrics is not None:
                        self._metrics.add(child)
        except BaseException:
            self._withdraw(requests)
            raise

    def _step(self) -> list[PreparedRequest]:
        """Run one step. Returns the requests with new output."""
        deltas = self.engine.step()
        if self._metrics is not None:
            self._metrics.take(deltas)
        changed, stopped = self._collector.take(deltas)
        self._end(stopped, FinishReason.STOP)
        return changed

    def _end(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """End completions in the engine, if there are any."""
        if request_ids:
            self.engine.abort(request_ids)
            if self._metrics is not None:
                self._metrics.end(request_ids, reason)

    def _withdraw(self, requests: Iterable[PreparedRequest]) -> None:
        """Abort requests. If no others are left, run the engine until it is idle."""
        for request in requests:
            self._end(self._collector.remove(request), FinishReason.ABORT)
        while not self._collector and self.engine.has_work():
            self.engine.step()


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
