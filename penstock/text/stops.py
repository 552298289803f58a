"""Finds stop strings in text that arrives in pieces.

A scanner runs an Aho-Corasick automaton character by character. Its state is the longest suffix of
the text that could still become a stop string. Exactly this suffix must be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_ROOT = 0


class StopStrings:
    """Stop strings, compiled once. Any number of scanners may share them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = list(stops)
        self.children: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self.fallback: list[int] = [_ROOT]  # the longest proper suffix that is also a node
        self.match: list[int | None] = [None]  # the first stop in the list that ends here
        for index, stop in enumerate(self.stops):
            self._insert(stop, index)
        self._link()

    def _insert(self, stop: str, index: int) -> None:
        node = _ROOT
        for char in stop:
            if char not in self.children[node]:
                self.children[node][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[node] + 1)
                self.fallback.append(_ROOT)
                self.match.append(None)
            node = self.children[node][char]
        if self.match[node] is None:
            self.match[node] = index

    def _link(self) -> None:
        queue = deque(self.children[_ROOT].values())
        while queue:  # breadth first: a fallback is shallower, so it is complete
            node = queue.popleft()
            shorter = self.match[self.fallback[node]]
            own = self.match[node]
            if shorter is not None:
                self.match[node] = shorter if own is None else min(own, shorter)
            for char, child in self.children[node].items():
                self.fallback[child] = self.step(self.fallback[node], char)
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        while node != _ROOT and char not in self.children[node]:
            node = self.fallback[node]
        return self.children[node].get(char, _ROOT)


class StopScanner:
    """Finds the stop string that is completed first; among ties, the first in the list.

    `matched` is that stop string. Without `include`, text that could still become part of one is
    held back, and the stop string itself is never returned.
    """

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._node = _ROOT
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, may_stop: bool = True) -> str:
        """The text that is certain now.

        Without `may_stop`, matches that end in `text` do not count.
        """
        assert self.matched is None, "text after a stop string"
        stops, node = self._stops, self._node
        for position, char in enumerate(text, start=1):
            node = stops.step(node, char)
            index = stops.match[node]
            if index is not None and may_stop:
                self.matched = stops.stops[index]
                return self._cut(text[:position])
            while node != _ROOT and not stops.children[node]:
                node = stops.fallback[node]  # no longer match continues here
        self._node = node
        available = self._held + text
        num_held = 0 if self._include else stops.depth[node]
        cut = len(available) - num_held
        self._held = available[cut:]
        return available[:cut]

    def flush(self) -> str:
        """The text held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str) -> str:
        assert self.matched is not None
        available, self._held = self._held + text, ""
        return available if self._include else available[: len(available) - len(self.matched)]
