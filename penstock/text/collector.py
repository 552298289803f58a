"""`OutputCollector` turns the deltas of many requests into the new output of each."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.protocol.delta import EngineDelta
from penstock.text.frontend import PreparedRequest


class OutputCollector:
    """Passes each delta to its request's assembler, and finds children that a stop string ended."""

    def __init__(self) -> None:
        self._routes: dict[str, PreparedRequest] = {}  # by child id

    def __len__(self) -> int:
        """The number of unfinished completions."""
        return len(self._routes)

    def add(self, request: PreparedRequest) -> None:
        for child in request.children:
            self._routes[child.request_id] = request

    def take(self, deltas: Iterable[EngineDelta]) -> tuple[list[PreparedRequest], list[str]]:
        """Requests with new output, and children to abort because their text is complete.

        Deltas of unknown requests are ignored.
        """
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
        """Remove a request. Returns its unfinished children."""
        ids = [child.request_id for child in request.children]
        return [child_id for child_id in ids if self._routes.pop(child_id, None) is not None]
