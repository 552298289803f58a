"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response

from penstock.conversation.output import TurnAnswer, TurnStep, TurnUsage
from penstock.protocol.outputs import Message
from penstock.server.http.bodies import JsonRoute
from penstock.server.openai.calls import CallFormat, FunctionCall
from penstock.server.openai.logprobs import chat_usage, prompt_logprobs
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
from penstock.server.openai.stream import ANSWERS, AnswerFormat, Exchange, complete
from penstock.server.openai.tools import (
    CustomToolDefinition,
    NamedCustomChoice,
    NamedToolChoice,
    ToolReference,
)
from penstock.server.turn import Turn
from penstock.text.parsing.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallBroken

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ANSWERS)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Create a chat completion."""
    return await complete(request, body, "chatcmpl-", prepare_chat, ChatAnswer)


class ChatAnswer(AnswerFormat[ChatCompletionRequest]):
    """Formats the answer to one conversation."""

    def __init__(self, exchange: Exchange[ChatCompletionRequest], turn: Turn) -> None:
        body = exchange.body
        super().__init__(exchange, body.top_logprobs)
        self._turn = turn
        self._calls = _call_format(body)
        last = body.messages[-1]
        continues = bool(body.echo and body.continue_final_message)
        role = exchange.service.server_config.response_role
        self._role = last.role if body.continue_final_message else role
        self._echo = last.content if continues and isinstance(last.content, str) else ""

    async def whole(self) -> ChatCompletion:
        """The complete answer."""
        answers = await self._turn.whole()
        completion = ChatCompletion(
            object="chat.completion",
            choices=[self._choice(answer) for answer in answers],
            usage=chat_usage(self._turn.usage, self._shows_usage.with_details),
            **self._identity,
        )
        self._add_prompt(completion)
        return completion

    async def chunks(self) -> AsyncGenerator[str, None]:
        """Stream chunks: the role, then the content, and at the end the usage."""
        opened: set[int] = set()
        before = replace(self._turn.usage)  # as it is before a choice's first step
        async with contextlib.aclosing(self._turn.steps()) as steps:
            async for step in steps:
                if step.index not in opened:
                    before.num_cached = self._turn.usage.num_cached
                    opening = self._opening(step.index, before)
                    if not opened:
                        self._add_prompt(opening)
                    opened.add(step.index)
                    yield opening.model_dump_json(exclude_unset=True)
                if (text := self._only_text(step)) is not None:
                    yield self._texts.write(step.index, text, partial(self._text_chunk, step.index))
                elif self._says_something(step):
                    yield self._chunk(step).model_dump_json(exclude_unset=True)
                if self._shows_usage.in_every_chunk:
                    before = replace(self._turn.usage)
        if self._shows_usage.at_end:
            final = self._make_chunk([])
            final.usage = chat_usage(self._turn.usage, self._shows_usage.with_details)
            yield final.model_dump_json(exclude_unset=True)

    def _choice(self, answer: TurnAnswer) -> ChatChoice:
        choice = ChatChoice(
            index=answer.index,
            message=self._message(answer.message),
            logprobs=self._logprobs_of(answer),
            finish_reason=self._calls.finish_reason(answer.finish_reason),
            stop_reason=answer.stop_reason,
        )
        self._add_tokens(choice, answer)
        return choice

    def _message(self, said: Message) -> AssistantMessage:
        content: str | None = self._echo + said.content
        message = AssistantMessage(
            role=self._role, content=content or (None if said.tool_calls else "")
        )
        if said.reasoning and self._body.include_reasoning is not False:
            message.reasoning = said.reasoning
        if said.tool_calls and self._calls.is_legacy:
            call = said.tool_calls[0]
            message.function_call = FunctionCall(name=call.name, arguments=call.arguments)
        elif said.tool_calls:
            message.tool_calls = self._calls.whole(said.tool_calls)
        return message

    def _opening(self, index: int, usage: TurnUsage) -> ChatCompletionChunk:
        delta = ChatDelta(role=self._role, content=self._echo)
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
        return self._make_chunk([choice], usage)

    def _says_something(self, step: TurnStep) -> bool:
        """Whether the chunk has content. A step may have none while text is held back."""
        shows_tokens = self._body.return_token_ids or step.logprobs is not None
        shows_tokens = shows_tokens or self._shows_usage.in_every_chunk
        return bool(step.deltas or step.finish_reason or shows_tokens)

    def _only_text(self, step: TurnStep) -> str | None:
        """The text of a step that has nothing but content, else None."""
        if len(step.deltas) != 1 or not isinstance(delta := step.deltas[0], ContentDelta):
            return None
        says_more = step.finish_reason is not None or step.logprobs is not None
        says_more = says_more or self._body.return_token_ids or self._shows_usage.in_every_chunk
        return None if says_more else delta.text

    def _text_chunk(self, index: int, text: str) -> ChatCompletionChunk:
        return self._chunk(TurnStep(index, [ContentDelta(text)], [], None, None, None))

    def _chunk(self, step: TurnStep) -> ChatCompletionChunk:
        choice = ChatChunkChoice(
            index=step.index,
            delta=self._delta(step.index, step.deltas),
            logprobs=self._logprobs_of(step),
            finish_reason=self._calls.finish_reason(step.finish_reason),
        )
        if step.finish_reason is not None:
            choice.stop_reason = step.stop_reason
        self._add_tokens(choice, step)
        return self._make_chunk([choice])

    def _delta(self, index: int, deltas: Sequence[Delta]) -> ChatDelta:
        content, reasoning = "", ""
        calls = self._calls.pieces(index, deltas)
        for delta in deltas:
            match delta:
                case ContentDelta(text) | ToolCallBroken(text=text):
                    content += text
                case ReasoningDelta(text):
                    reasoning += text
        made = ChatDelta()
        if reasoning and self._body.include_reasoning is not False:
            made.reasoning = reasoning
        if calls and self._calls.is_legacy:
            made.function_call = calls[0].function
        elif calls:
            made.tool_calls = calls
        if content or not (reasoning or calls):
            made.content = content
        return made

    def _make_chunk(
        self, choices: list[ChatChunkChoice], usage: TurnUsage | None = None
    ) -> ChatCompletionChunk:
        """Make a chunk. If every chunk has usage, it is `usage` or the current one."""
        chunk = ChatCompletionChunk(
            object="chat.completion.chunk", choices=choices, **self._identity
        )
        if self._shows_usage.in_every_chunk:
            chunk.usage = chat_usage(usage or self._turn.usage, self._shows_usage.with_details)
        elif self._shows_usage.at_end:
            chunk.usage = None
        return chunk

    def _logprobs_of(self, item: TurnAnswer | TurnStep) -> ChatLogprobs | None:
        return None if item.logprobs is None else self._logprobs.chat(item.logprobs)

    def _add_tokens(
        self, choice: ChatChoice | ChatChunkChoice, item: TurnAnswer | TurnStep
    ) -> None:
        choice.token_ids = item.token_ids if self._body.return_token_ids else None
        self._add_extras(choice, item)

    def _add_prompt(self, reply: ChatCompletion | ChatCompletionChunk) -> None:
        """Add the prompt's logprobs and token ids, if requested."""
        asked = self._turn.prompt_logprobs
        reply.prompt_logprobs = None if asked is None else prompt_logprobs(asked)
        reply.prompt_token_ids = (
            self._turn.prompt_token_ids if self._body.return_token_ids else None
        )


def _call_format(body: ChatCompletionRequest) -> CallFormat:
    named = (NamedToolChoice, NamedCustomChoice)
    return CallFormat(
        custom={t.custom.name for t in body.tools or () if isinstance(t, CustomToolDefinition)},
        is_named=isinstance(body.tool_choice, named)
        or isinstance(body.function_call, ToolReference),
        is_legacy=body.functions is not None,
    )
