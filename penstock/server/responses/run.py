"""ResponseRun: runs one response: rounds of model output and calls to tool servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.conversation.output import TurnUsage
from penstock.conversation.request import TurnRequest
from penstock.protocol.errors import InputError
from penstock.server.http.errors import Overloaded, body_of
from penstock.server.openai.logprobs import LogprobFormat
from penstock.server.responses.convert import OfferedTools, prepare
from penstock.server.responses.items import Item, as_messages, new_id
from penstock.server.responses.output import Event, Output
from penstock.server.responses.protocol import FunctionTool, ResponseRequest
from penstock.server.responses.tool_servers import ToolResult, ToolServers
from penstock.server.service import Service
from penstock.server.turn import Turn


@dataclass
class ResponseJob:
    """The input of a response. `items` are the conversation that it answers."""

    body: ResponseRequest
    model: str
    items: list[Item]
    offered: OfferedTools
    turn: Turn
    request: TurnRequest  # from which `turn` was made
    conversation_id: str | None
    is_stored: bool


class ResponseRun:
    """Runs one response. Call either `events` or `steps`, once. The constructor is slow."""

    def __init__(
        self, service: Service, tool_servers: ToolServers, job: ResponseJob, request_id: str
    ) -> None:
        self._service = service
        self._tool_servers = tool_servers
        self._job = job
        self._request_id = request_id
        self.id = new_id("resp")
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self.status = "queued" if job.body.background else "in_progress"
        self._error: dict[str, Any] | None = None
        self._turns = [job.turn]  # one per round; the last one is running
        self._num_calls = 0
        self._echo = _echo(job)
        num_top = job.body.top_logprobs or 0
        self._output = Output(
            job.offered.servers,
            LogprobFormat(service.frontend.tokenizer, num_top, False),
            job.offered.custom,
        )

    async def events(self) -> AsyncGenerator[Event, None]:
        """Stream numbered events. The last one tells how the response ended.

        An error before the first event is raised. A later error makes the response fail.
        """
        number = 0
        try:
            async with contextlib.aclosing(self.steps()) as events:
                async for event in events:
                    yield {**event, "sequence_number": number}
                    number += 1
        except Exception as error:
            if number == 0:
                raise
            self.fail(error)
        yield {
            "type": f"response.{self.status}",
            "response": self.snapshot(),
            "sequence_number": number,
        }

    def fail(self, error: Exception) -> None:
        """End the response with an error."""
        told = body_of(error, self._request_id)["error"]
        self.status = "failed"
        self._error = {"code": error_code(error), "message": told["message"]}

    def cancel(self) -> None:
        self.status = "cancelled"

    async def steps(self) -> AsyncGenerator[Event, None]:
        """Stream the events between the first token and the last.

        Raises the error if the response fails.
        """
        request, has_begun, is_cut_off = self._job.request, False, False
        for num_left in reversed(range(self._service.server_config.max_tool_rounds + 1)):
            reason: str | None = None
            self._output.begin_round()
            async with contextlib.aclosing(self._turns[-1].steps()) as steps:
                async for step in steps:
                    if not has_begun:
                        has_begun, self.status = True, "in_progress"
                        for event in self._opening():
                            yield event
                    for event in self._output.take(step.deltas, step.logprobs):
                        yield event
                    reason = step.finish_reason
            is_cut_off = reason == "length"
            for event in self._output.end_round(is_cut_off):
                yield event
            async for event in self._make_calls():
                yield event
            following = None if is_cut_off else self._next_request(request, num_left)
            if following is None:
                break
            if following.params.max_tokens == 0:
                is_cut_off = True
                break
            turn, request = await self._service.in_thread(
                prepare, self._service, following, self.id, self._job.body.truncation == "auto"
            )
            self._turns.append(turn)
        self.status = "incomplete" if is_cut_off else "completed"
        self._completed_at = None if is_cut_off else int(time.time())

    def _opening(self) -> list[Event]:
        events = [
            {"type": f"response.{kind}", "response": self.snapshot()}
            for kind in ("created", "in_progress")
        ]
        listed = {
            item["server_label"] for item in self._job.items if item["type"] == "mcp_list_tools"
        }
        servers = {server.label: server for server in self._job.offered.servers.values()}
        for label, server in servers.items():
            if label not in listed:
                events += self._output.list_tools(server)
        self._output.begin_round()
        return events

    # -- calls to tool servers

    async def _make_calls(self) -> AsyncGenerator[Event, None]:
        """Make this round's calls to tool servers, concurrently."""
        calls = [
            item
            for item in self._output.round_items()
            if item["type"] == "mcp_call" and item["status"] == "in_progress"
        ]
        results = await asyncio.gather(*(self._call(item) for item in calls))
        for item, result in zip(calls, results, strict=True):
            for event in self._output.finish_call(item, result):
                yield event

    async def _call(self, item: Item) -> ToolResult:
        most = self._job.body.max_tool_calls
        if most is not None and self._num_calls >= most:
            return ToolResult.failed(f"no more than {most} calls are allowed (max_tool_calls)")
        self._num_calls += 1
        server = self._job.offered.servers[item["name"]]
        return await self._tool_servers.call(server, item["name"], item["arguments"])

    def _next_request(self, request: TurnRequest, num_left: int) -> TurnRequest | None:
        """Return the request for the next round, or None if there is none.

        There is none without calls to tool servers, or if the client must make other calls first.
        """
        said = self._output.round_items()
        kinds = {item["type"] for item in said}
        if "mcp_call" not in kinds or kinds & {"function_call", "custom_tool_call"}:
            return None
        # A required call has been made. From now on the model decides, if it can. In the last round
        # it must answer.
        can_choose = (
            self._service.frontend.parsers.tools is not None
            and self._service.config.chat.enable_auto_tool_choice
        )
        most = self._job.body.max_tool_calls
        is_last = num_left <= 1 or (most is not None and self._num_calls >= most)
        params = request.params
        if self._job.body.max_output_tokens is not None:
            left = max(self._job.body.max_output_tokens - self._usage().num_completion, 0)
            params = msgspec.structs.replace(params, max_tokens=left)
        return replace(
            request,
            messages=[*request.messages, *as_messages(None, said, knows_developers=False)],
            params=params,
            tool_choice="auto" if can_choose and not is_last else "none",
        )

    # -- the response object

    def _usage(self) -> TurnUsage:
        """The usage of all rounds. Each round reads the conversation again, mostly cached."""
        total = TurnUsage()
        for turn in self._turns:
            total.add(turn.usage)
        return total

    @property
    def is_background(self) -> bool:
        return bool(self._job.body.background)

    @property
    def is_stored(self) -> bool:
        return self._job.is_stored

    @property
    def output(self) -> list[Item]:
        return self._output.items

    def snapshot(self) -> dict[str, Any]:
        """The current state of the response."""
        body, params = self._job.body, self._job.request.params
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        reasoning = body.reasoning
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "background": bool(body.background),
            "conversation": self._conversation(),
            "error": self._error,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._job.model,
            "output": list(self._output.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "store": self._job.is_stored,
            "temperature": params.temperature,
            **self._echo,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if is_open(self.status) else _usage_reply(self._usage()),
            "user": body.user,
        }

    def _conversation(self) -> dict[str, str] | None:
        conversation_id = self._job.conversation_id
        return None if conversation_id is None else {"id": conversation_id}


def is_open(status: str) -> bool:
    """Whether a response with this status has not ended yet."""
    return status in ("queued", "in_progress")


def _echo(job: ResponseJob) -> dict[str, Any]:
    """Return the request's long fields as the response echoes them."""
    body = job.body
    text = body.text.model_dump(exclude_unset=True, by_alias=True) if body.text else {}
    text["format"] = text.get("format") or {"type": "text"}
    choice: Any = body.tool_choice or "auto"
    return {
        "text": text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": _echo_tools(body),
    }


def error_code(error: Exception) -> str:
    """The API's code for an error."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InputError) else "server_error"


def _echo_tools(body: ResponseRequest) -> list[dict[str, Any]]:
    tools = []
    for given in body.tools or ():
        tool = given.model_dump(exclude_unset=True)
        if isinstance(given, FunctionTool):
            tool = {"description": None, "parameters": None, "strict": False, **tool}
        tools.append(tool)
    return tools


def _usage_reply(usage: TurnUsage) -> dict[str, Any]:
    details = {"cached_tokens": usage.num_cached, "cache_write_tokens": 0}
    if usage.num_image or usage.num_video:
        details |= {"image_tokens": usage.num_image, "video_tokens": usage.num_video}
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": details,
        "output_tokens": usage.num_completion,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.num_total,
    }


def encode(event: Event) -> str:
    """Encode as ASCII: echoed client input may not be valid Unicode."""
    return json.dumps(event)
