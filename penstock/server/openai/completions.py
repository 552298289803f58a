"""POST /v1/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response

from penstock.protocol.outputs import CompletionOutput, LogprobsAtPosition, RequestOutput
from penstock.server.http.bodies import JsonRoute
from penstock.server.openai.logprobs import TextOffsets, prompt_logprobs, prompt_offsets
from penstock.server.openai.prompts import prepare_completions
from penstock.server.openai.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from penstock.server.openai.stream import ANSWERS, AnswerFormat, Exchange, UsageCounter, complete
from penstock.text.frontend import PreparedRequest

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


@router.post("/v1/completions", response_model=Completion, responses=ANSWERS)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete one or more prompts."""
    return await complete(request, body, "cmpl-", prepare_completions, CompletionAnswer)


class CompletionAnswer(AnswerFormat[CompletionRequest]):
    """Formats the completions of one request's prompts."""

    def __init__(
        self, exchange: Exchange[CompletionRequest], prepared: Sequence[PreparedRequest]
    ) -> None:
        body = exchange.body
        super().__init__(exchange, body.logprobs)
        self._prepared = prepared
        self._usage = UsageCounter(self._shows_usage)
        # A prompt's logprobs arrive once, but each of its completions echoes them.
        self._prompt_logprobs: dict[int, list[LogprobsAtPosition | None]] = {}
        self._prompt_only = bool(body.echo) and body.max_tokens == 0
        self._begun: set[int] = set()  # choices whose first chunk was made
        self._offsets: dict[int, TextOffsets] = {}  # by choice, if logprobs are requested

    async def whole(self) -> Completion:
        """The complete answer."""
        finals: dict[int, RequestOutput] = {}
        outputs = self._service.outputs(self._prepared, self._body.timeout)
        async with contextlib.aclosing(outputs):
            async for index, output in outputs:
                finals[index] = output
        choices = []
        for index in range(len(self._prepared)):
            output = self._visible(finals[index])
            self._usage.count(index, output)
            choices += [self._choice(index, output, item) for item in output.outputs]
        return self._reply(choices, usage_now=True)

    async def chunks(self) -> AsyncGenerator[str, None]:
        """Stream chunks, and at the end the usage."""
        outputs = self._service.outputs(self._prepared, self._body.timeout)
        async with contextlib.aclosing(outputs):
            async for index, raw in outputs:
                output = self._visible(raw)
                self._usage.count(index, output)
                for item in output.outputs:
                    make = partial(self._chunk, index, output, item)
                    if self._says_only_text(index, item):
                        yield self._texts.write(self._number(index, item), item.text, make)
                    else:
                        yield make(item.text).model_dump_json(exclude_unset=True)
        if self._shows_usage.at_end:
            yield self._reply([], usage_now=True).model_dump_json(exclude_unset=True)

    def _says_only_text(self, index: int, item: CompletionOutput) -> bool:
        if self._number(index, item) not in self._begun:
            return False
        says_more = item.finish_reason is not None or item.logprobs is not None
        return not (says_more or self._body.return_token_ids or self._shows_usage.in_every_chunk)

    def _chunk(
        self, index: int, output: RequestOutput, item: CompletionOutput, text: str
    ) -> Completion:
        return self._reply([self._choice(index, output, replace(item, text=text))])

    def _visible(self, output: RequestOutput) -> RequestOutput:
        """Remove the one generated token if only the prompt's echo was requested."""
        if self._prompt_only:
            for item in output.outputs:
                item.text, item.token_ids = "", []
                item.logprobs = None if item.logprobs is None else []
        return output

    def _number(self, index: int, item: CompletionOutput) -> int:
        """The index of a choice. Completions of one prompt are adjacent."""
        return index * (self._body.n or 1) + item.index

    def _choice(
        self, index: int, output: RequestOutput, item: CompletionOutput
    ) -> CompletionChoice:
        """Make a choice or a chunk of one. The first chunk includes the prompt's data."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        number = self._number(index, item)
        first = number not in self._begun
        self._begun.add(number)
        echo = self._prompt_text(output) if first and self._body.echo else None
        if first and item.logprobs is not None:
            self._offsets[number] = self._text_offsets(output, start=len(echo or ""))
        choice = CompletionChoice(
            index=number,
            text=(echo or "") + item.text,
            logprobs=self._logprobs_of(index, output, item, echo),
            finish_reason=item.finish_reason,
            stop_reason=item.stop_reason,
            token_ids=item.token_ids if self._body.return_token_ids else None,
            prompt_token_ids=None,
        )
        if first and self._body.return_token_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        self._add_extras(choice, item)
        if first and index in self._prompt_logprobs and self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._prompt_logprobs[index])
        return choice

    def _text_offsets(self, output: RequestOutput, start: int) -> TextOffsets:
        tokenizer = self._service.frontend.tokenizer
        if tokenizer is None:
            return TextOffsets(None)
        hides = self._prepared[0].children[0].sampling.skip_special_tokens
        return TextOffsets(tokenizer.detokenizer(output.prompt_token_ids, hides), start)

    def _logprobs_of(
        self, index: int, output: RequestOutput, item: CompletionOutput, echo: str | None
    ) -> CompletionLogprobs | None:
        """Format logprobs. `echo` is the prompt's text if the choice begins with it."""
        if item.logprobs is None:
            return None
        token_ids = item.token_ids
        positions: list[LogprobsAtPosition | None] = [*item.logprobs]
        offsets = self._offsets[self._number(index, item)].take(token_ids)
        if echo is not None and index in self._prompt_logprobs:
            prompt_ids = output.prompt_token_ids
            token_ids = prompt_ids + token_ids
            positions = self._prompt_logprobs[index] + positions
            offsets = prompt_offsets(self._service.frontend.tokenizer, prompt_ids, echo) + offsets
        return self._logprobs.completion(token_ids, positions, offsets)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._service.frontend.tokenizer
        if tokenizer is None:
            return ""
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _reply(self, choices: list[CompletionChoice], usage_now: bool = False) -> Completion:
        reply = Completion(object="text_completion", choices=choices, **self._identity)
        if usage_now or self._shows_usage.in_every_chunk:
            reply.usage = self._usage.so_far()
        elif self._shows_usage.at_end:
            reply.usage = None
        return reply
