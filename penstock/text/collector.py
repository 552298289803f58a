"""OutputCollector: from the deltas of many requests to what is new for each."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.protocol.delta import EngineDelta
from penstock.text.frontend import PreparedRequest


class OutputCollector:
    """Hands each delta to the assembler of its request, and finds those that a stop string ends."""

    def __init__(self) -> None:
        self._routes: dict[str, PreparedRequest] = {}  # by the child's id

    def __len__(self) -> int:
        """How many completions are unfinished."""
        return len(self._routes)

    def add(self, request: PreparedRequest) -> None:
        for child in request.children:
            self._routes[child.request_id] = request

    def take(self, deltas: Iterable[EngineDelta]) -> tuple[list[PreparedRequest], list[str]]:
        """Requests that have something new, and children that are to be ended: their text is
        complete. Deltas of requests that are not here are ignored."""
        changed: dict[str, PreparedRequest] = {}
        stopped: list[str] = []
        for delta in deltas:
            request = self._routes.get(delta.request_id)
            if request is None:
                continue
            if delta.finish_reason is not None:
                del self._routes[delta.request_id]
            request.assembler.add(delta)
            for child_id in request.assembler.stopped_children():
                if self._routes.pop(child_id, None) is not None:
                    stopped.append(child_id)
            changed[request.request_id] = request
        return list(changed.values()), stopped

    def remove(self, request: PreparedRequest) -> list[str]:
        """Its children that are unfinished; none of them is here any more."""
        ids = [child.request_id for child in request.children]
        return [child_id for child_id in ids if self._routes.pop(child_id, None) is not None]
