"""Output: builds the output items of a response as the model writes, and their events."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from penstock.protocol.outputs import LogprobsAtPosition
from penstock.server.openai.custom_tools import InputReader
from penstock.server.openai.logprobs import LogprobFormat
from penstock.server.responses.items import Item, new_id
from penstock.server.responses.tool_servers import ToolResult, ToolServer
from penstock.text.parsing.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
)

Event = dict[str, Any]
CUSTOM = "custom_tool_call"
# Event names for a call's arguments, by the item's type.
ARGUMENT_EVENTS = {
    "function_call": "function_call_arguments",
    "mcp_call": "mcp_call_arguments",
    CUSTOM: "custom_tool_call_input",
}


class Output:
    """All output items of one response, over all rounds of calls.

    Methods yield events in the order that clients expect. `servers` maps the names of tools that
    this server calls. The client calls all others. `custom` holds the names of tools that take
    plain text.
    """

    def __init__(
        self,
        servers: Mapping[str, ToolServer],
        logprobs: LogprobFormat,
        custom: Collection[str] = (),
    ) -> None:
        self._servers = servers
        self._custom = custom
        self._input = InputReader()  # of the open custom call
        self._logprobs = logprobs
        self._items: list[Item] = []
        self._broken: list[Item] = []
        self._open: Item | None = None  # the last item, while it is being written
        self._round_start = 0
        # Logprobs of tokens whose text is held back: their item is not known yet.
        self._held: list[LogprobsAtPosition] = []

    @property
    def items(self) -> list[Item]:
        """All items except revoked calls."""
        return [item for item in self._items if not any(item is bad for bad in self._broken)]

    def round_items(self) -> list[Item]:
        """The items since the last `begin_round`."""
        return [item for item in self.items if self._index(item) >= self._round_start]

    def begin_round(self) -> None:
        self._round_start = len(self._items)
        self._held = []

    def list_tools(self, server: ToolServer) -> Iterator[Event]:
        """Add an item that lists a server's tools."""
        tools = [
            {
                "name": tool.name,
                "description": tool.description,
                "input_schema": dict(tool.parameters),
                "annotations": None,
            }
            for tool in server.tools
            if self._servers.get(tool.name) is server
        ]
        item = {
            "id": new_id("mcpl"),
            "type": "mcp_list_tools",
            "server_label": server.label,
            "tools": tools,
            "error": None,
        }
        yield self._added(item, {"tools": []})
        yield self._event("response.mcp_list_tools.in_progress", item)
        yield self._event("response.mcp_list_tools.completed", item)
        yield self._done(item)

    def take(
        self, deltas: Sequence[Delta], logprobs: Sequence[LogprobsAtPosition] | None
    ) -> Iterator[Event]:
        """Add the model's new output."""
        self._held += logprobs or ()
        if not deltas:
            return
        held, self._held = self._held, []
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    yield from self._think(text)
                case ContentDelta(text) | ToolCallBroken(text=text):
                    if isinstance(delta, ToolCallBroken):
                        yield from self._break_call()
                    yield from self._say(text, held)
                    held = []
                case ToolCallStart(_, call_id, name):
                    yield from self.close()
                    yield from self._begin_call(call_id, name)
                case ToolCallArguments(_, text):
                    yield from self._go_on_with_call(text)
                case ToolCallEnd():
                    yield from self._go_on_with_call("", is_end=True)
                    yield from self.close()

    def end_round(self, is_cut_off: bool) -> Iterator[Event]:
        """The model finished, or reached its limit."""
        if self._open is not None:
            if self._open["type"] == "message":  # logprobs of an end token without text
                self._add_logprobs(self._held)
            yield from self.close("incomplete" if is_cut_off else "completed")
        elif not self.round_items() and not is_cut_off:
            yield from self._say("", [])
            yield from self.close()

    def finish_call(self, item: Item, result: ToolResult) -> Iterator[Event]:
        """Add the result of a call to a tool server."""
        item["output"], item["error"] = result.output, result.error
        item["status"] = "completed" if result.error is None else "failed"
        yield self._event(f"response.mcp_call.{item['status']}", item)
        yield self._done(item)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, if there is one. Calls to tool servers stay in progress."""
        item, self._open = self._open, None
        if item is None:
            return
        item["status"] = status
        if item["type"] in ("message", "reasoning"):
            part = item["content"][0]
            kind, extra = "response.reasoning_text.done", {}
            if item["type"] == "message":
                kind, extra = "response.output_text.done", {"logprobs": part["logprobs"]}
            place = {"content_index": 0}
            yield self._event(kind, item, **place, text=part["text"], **extra)
            yield self._event("response.content_part.done", item, **place, part=dict(part))
            yield self._done(item)
            return
        if status == "completed" and item["type"] == CUSTOM:
            yield self._event(f"{_arguments_event(item)}.done", item, input=item["input"])
        elif status == "completed":
            yield self._event(
                f"{_arguments_event(item)}.done",
                item,
                name=item["name"],
                arguments=item["arguments"],
            )
        if item["type"] != "mcp_call" or status != "completed":
            yield self._done(item)
        else:
            item["status"] = "in_progress"

    # -- kinds of items

    def _think(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "reasoning":
            yield from self.close()
            part = {"type": "reasoning_text", "text": ""}
            yield from self._begin_text(
                {"id": new_id("rs"), "type": "reasoning", "summary": []}, part
            )
        assert self._open is not None
        self._open["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", self._open, content_index=0, delta=text)

    def _say(self, text: str, positions: Sequence[LogprobsAtPosition]) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "message":
            yield from self.close()
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": new_id("msg"), "type": "message", "role": "assistant"}
            yield from self._begin_text(item, part)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        logprobs = self._add_logprobs(positions)
        if text:
            yield self._event(
                "response.output_text.delta",
                self._open,
                content_index=0,
                delta=text,
                logprobs=logprobs,
            )

    def _add_logprobs(self, positions: Sequence[LogprobsAtPosition]) -> list[dict[str, Any]]:
        """Add logprobs to the open message. Returns them as they are stored."""
        assert self._open is not None
        entries = [entry.model_dump() for entry in self._logprobs.chat(positions).content]
        self._open["content"][0]["logprobs"] += entries
        return entries

    def _begin_text(self, item: Item, part: dict[str, Any]) -> Iterator[Event]:
        item |= {"status": "in_progress", "content": [part]}
        yield self._added(item, {"content": []})
        self._open = item
        yield self._event(
            "response.content_part.added", item, content_index=0, part=copy.deepcopy(part)
        )

    def _begin_call(self, call_id: str, name: str) -> Iterator[Event]:
        server = self._servers.get(name)
        item: Item = {"status": "in_progress", "name": name, "arguments": ""}
        if name in self._custom:
            self._input = InputReader()
            item = {"id": new_id("ctc"), "type": CUSTOM, "status": "in_progress"}
            item |= {"call_id": call_id, "name": name, "input": ""}
        elif server is None:
            item |= {"id": new_id("fc"), "type": "function_call", "call_id": call_id}
        else:
            item |= {
                "id": new_id("mcp"),
                "type": "mcp_call",
                "server_label": server.label,
                "output": None,
                "error": None,
                "approval_request_id": None,
            }
        yield self._added(item)
        self._open = item
        if server is not None:
            yield self._event("response.mcp_call.in_progress", item)

    def _go_on_with_call(self, text: str, is_end: bool = False) -> Iterator[Event]:
        """Add a piece of a call's arguments, or of a custom tool's input."""
        item = self._open
        assert item is not None
        key = "arguments"
        if item["type"] == CUSTOM:
            key = "input"
            text = self._input.finish() if is_end else self._input.feed(text)
        if text:
            item[key] += text
            yield self._event(f"{_arguments_event(item)}.delta", item, delta=text)

    def _break_call(self) -> Iterator[Event]:
        """Revoke a call. Clients that saw its beginning see it as incomplete."""
        if self._open is not None and self._open["type"] in ARGUMENT_EVENTS:
            self._broken.append(self._open)
            if self._open["type"] == "mcp_call":
                yield self._event("response.mcp_call.failed", self._open)
            yield from self.close("incomplete")

    # -- events

    def _added(self, item: Item, shown: Mapping[str, Any] | None = None) -> Event:
        """Announce `item`, with the values in `shown` in place of its own."""
        self._items.append(item)
        index = self._index(item)
        told = {**copy.deepcopy(item), **(shown or {})}
        return {"type": "response.output_item.added", "output_index": index, "item": told}

    def _done(self, item: Item) -> Event:
        index, told = self._index(item), copy.deepcopy(item)
        return {"type": "response.output_item.done", "output_index": index, "item": told}

    def _event(self, kind: str, item: Item, **fields: Any) -> Event:
        where = {"item_id": item["id"], "output_index": self._index(item)}
        return {"type": kind, **where, **fields}

    def _index(self, item: Item) -> int:
        """The index among all items, including revoked ones, so that it never changes."""
        at = len(self._items) - 1
        while self._items[at] is not item:
            at -= 1
        return at


def _arguments_event(item: Item) -> str:
    return f"response.{ARGUMENT_EVENTS[item['type']]}"
