"""Turn: runs one turn of a conversation on the engine. All chat APIs use it.

Each API converts its body to a `TurnRequest`, calls `prepare_turn` in a thread, and writes the
results of the `Turn` in its own format:

    turn = await service.in_thread(prepare_turn, service, request, request_id)
    async with contextlib.aclosing(turn.steps()) as steps:   # streaming
        async for step in steps: ...
    answers = await turn.whole()                              # or everything at the end
    turn.usage                                                # counts so far; final at the end

Set `params.output_kind` to DELTA for streaming, to FINAL_ONLY for `whole`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Literal

from penstock.conversation import prepare
from penstock.conversation.output import TurnAnswer, TurnStep, TurnUsage, join_steps
from penstock.conversation.request import TurnRequest
from penstock.protocol.outputs import LogprobsAtPosition
from penstock.protocol.sampling import OutputKind
from penstock.server.service import Service, check_weight

Api = Literal["chat_completions", "responses", "other"]


def prepare_turn(service: Service, request: TurnRequest, request_id: str, api: Api) -> Turn:
    """Check, render and tokenize a turn. Raises `InputError`. Slow: call it in a thread."""
    prepared = prepare.prepare_turn(service.frontend, request, service.engine_id(request_id))
    return Turn(service, prepared, request, api)


class Turn:
    """One prepared turn. Call either `steps` or `whole`, once."""

    def __init__(
        self, service: Service, prepared: prepare.PreparedTurn, request: TurnRequest, api: Api
    ) -> None:
        self._service = service
        self._request = prepared.request
        self._reader = prepared.reader
        self._timeout_s = request.options.timeout_s
        self._has_tools = bool(request.tools) and request.tool_choice != "none"
        self._api = api
        self._is_streaming = request.params.output_kind is OutputKind.DELTA
        self.prompt_token_ids = prepared.request.children[0].prompt_token_ids

    def check_weight(self, num: int, field: str) -> None:
        """Raise `InputError` if this turn's fields are too long to run it `num` times."""
        check_weight(self._request.children[0], num, field)

    @property
    def usage(self) -> TurnUsage:
        return self._reader.usage

    @property
    def prompt_logprobs(self) -> list[LogprobsAtPosition | None] | None:
        """Known from the first step on."""
        return self._reader.prompt_logprobs

    async def steps(self) -> AsyncGenerator[TurnStep, None]:
        """Stream the steps of every choice. Close it when leaving early: that aborts the turn."""
        outputs = self._service.outputs([self._request], self._timeout_s)
        async with contextlib.aclosing(outputs):
            async for _, output in outputs:
                for step in self._reader.steps(output):
                    if self._has_tools and step.finish_reason is not None:
                        called = step.finish_reason == "tool_calls"
                        self._service.on_tool_turn(self._is_streaming, called, self._api)
                    yield step

    async def whole(self) -> list[TurnAnswer]:
        """Wait until all choices are finished and return them."""
        by_choice: dict[int, list[TurnStep]] = {}
        async with contextlib.aclosing(self.steps()) as steps:
            async for step in steps:
                by_choice.setdefault(step.index, []).append(step)
        return [join_steps(by_choice[index]) for index in sorted(by_choice)]
