"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response

from penstock.protocol.outputs import CompletionOutput, RequestOutput
from penstock.server.errors import describe_errors
from penstock.server.openai.logprobs import LogprobFormat, prompt_logprobs, usage
from penstock.server.openai.prompts import prepare_chat
from penstock.server.openai.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
)
from penstock.server.openai.routed_experts import encode_routed_experts
from penstock.server.openai.stream import EVENT_STREAM, UsageCounter
from penstock.server.replies import event_stream, gone, json_response, unless_gone
from penstock.server.service import Service
from penstock.text.frontend import PreparedRequest

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={**EVENT_STREAM, **describe_errors(400, 401, 404, 408, 413, 429, 500, 503)},
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    model = service.check_model(body.model)
    service.check_capacity()
    request_id = "chatcmpl-" + (body.request_id or request.state.request_id)
    prepared = await service.in_thread(prepare_chat, service, body, request_id)
    answer = ChatAnswer(service, body, prepared, model, request_id)
    if body.stream:
        return await event_stream(request, answer.chunks())
    completion = await unless_gone(request, answer.whole())
    return gone() if completion is None else json_response(completion)


class ChatAnswer:
    """One conversation's answer on its way out."""

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        prepared: PreparedRequest,
        model: str,
        request_id: str,
    ) -> None:
        self._service = service
        self._body = body
        self._prepared = prepared
        self._model = model
        self._id = request_id
        self._created = int(time.time())
        self._usage = UsageCounter(body.stream_options)
        self._logprobs = LogprobFormat(
            service.frontend.tokenizer,
            body.top_logprobs or 0,
            bool(body.return_tokens_as_token_ids),
        )
        last = body.messages[-1]
        continues = bool(body.echo and body.continue_final_message)
        self._role = last.role if body.continue_final_message else "assistant"
        self._echo = last.content if continues and isinstance(last.content, str) else ""

    async def whole(self) -> ChatCompletion:
        """Everything at once, when it is finished."""
        final: RequestOutput | None = None
        outputs = self._service.outputs([self._prepared], self._body.timeout)
        async with contextlib.aclosing(outputs):
            async for _, output in outputs:
                final = output
        assert final is not None, "a request ends with an output"
        num_completion = sum(len(item.token_ids) for item in final.outputs)
        completion = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._choice(item) for item in final.outputs],
            usage=usage(len(final.prompt_token_ids), num_completion, final.num_cached_tokens),
        )
        self._add_prompt(completion, final)
        return completion

    async def chunks(self) -> AsyncGenerator[str, None]:
        """Pieces as they come: who speaks, what is said, and at the end the usage."""
        opened: set[int] = set()
        outputs = self._service.outputs([self._prepared], self._body.timeout)
        async with contextlib.aclosing(outputs):
            async for _, output in outputs:
                self._usage.count(0, output)
                for item in output.outputs:
                    if item.index not in opened:
                        opening = self._opening(item.index)
                        if not opened:
                            self._add_prompt(opening, output)
                        opened.add(item.index)
                        yield opening.model_dump_json(exclude_unset=True)
                    yield self._chunk(item).model_dump_json(exclude_unset=True)
        if self._usage.at_end:
            yield self._make_chunk([], usage_now=True).model_dump_json(exclude_unset=True)

    def _choice(self, item: CompletionOutput) -> ChatChoice:
        choice = ChatChoice(
            index=item.index,
            message=AssistantMessage(role=self._role, content=self._echo + item.text, refusal=None),
            logprobs=self._logprobs_of(item),
            finish_reason=item.finish_reason,
            stop_reason=item.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = item.token_ids
        if item.routed_experts is not None:
            choice.routed_experts = encode_routed_experts(item.routed_experts)
        return choice

    def _opening(self, index: int) -> ChatCompletionChunk:
        delta = ChatDelta(role=self._role, content=self._echo)
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
        return self._make_chunk([choice])

    def _chunk(self, item: CompletionOutput) -> ChatCompletionChunk:
        choice = ChatChunkChoice(
            index=item.index,
            delta=ChatDelta(content=item.text),
            logprobs=self._logprobs_of(item),
            finish_reason=item.finish_reason,
        )
        if item.finish_reason is not None:
            choice.stop_reason = item.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = item.token_ids
        if item.routed_experts is not None:
            choice.routed_experts = encode_routed_experts(item.routed_experts)
        return self._make_chunk([choice])

    def _make_chunk(
        self, choices: list[ChatChunkChoice], usage_now: bool = False
    ) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
        )
        if usage_now or self._usage.in_every_chunk:
            chunk.usage = self._usage.so_far()
        elif self._usage.at_end:
            chunk.usage = None
        return chunk

    def _logprobs_of(self, item: CompletionOutput) -> ChatLogprobs | None:
        return None if item.logprobs is None else self._logprobs.chat(item.logprobs)

    def _add_prompt(self, reply: ChatCompletion | ChatCompletionChunk, out: RequestOutput) -> None:
        """What was asked to be said about the prompt."""
        if out.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(out.prompt_logprobs)
        if self._body.return_token_ids:
            reply.prompt_token_ids = out.prompt_token_ids
