"""Suffix decoding: drafts what most often followed the last tokens, here and in past outputs.

The method is that of SuffixDecoding and of vLLM's `suffix`: the path is that of the most frequent
tokens, as long as it is probable enough. How probable it is was learned from earlier drafts: by the
length of the match, and by whether all matches of this length go on alike.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.protocol.step import NewRequest
from penstock.runner.drafters.chances import AGREED, ALONE, OWN, PAST, SPLIT, kind_of
from penstock.runner.drafters.host import Draft, HostDrafter
from penstock.runner.drafters.occurrences import ANCHORS, Occurrences

MOST_CACHED_TOKENS = 1 << 19  # of past outputs; each takes about 250 bytes
MOST_OUTPUT_TOKENS = 1 << 13  # of one past output: its last ones


class PathRules:
    """How many drafts a match is worth, and which."""

    def __init__(self, max_tree_depth: int, max_spec_factor: float) -> None:
        self.max_tree_depth = max_tree_depth
        self._budgets = [0]  # by the length of the match, of which a part may count
        for length in range(1, max_tree_depth + 1):
            own = min(int(length * max_spec_factor), max_tree_depth - length)
            self._budgets.append(max(own, self._budgets[-1]))

    def path(self, texts: Occurrences, tail: array[int], source: int, most: int) -> Iterator[Draft]:
        """What most often followed the longest matches, token by token, with its kind.

        Of equally frequent tokens, that of the most recent match counts.
        """
        found = texts.find(tail)
        if not found:
            return
        length = max(found)[0]
        budget = min(self._budgets[length], most)
        voters = [
            texts.following(place, budget, loops=source == OWN)
            for matched, place in found
            if matched == length
        ]
        for depth in range(budget):
            votes = [text[depth] for text in voters if len(text) > depth]
            if not votes:
                return
            token, agreement = votes[0], ALONE
            if len(voters) > 1:
                token = max(votes, key=votes.count)
                agreement = AGREED if votes.count(token) == len(voters) else SPLIT
            yield token, kind_of(source, agreement, length + depth)
            if agreement == SPLIT:
                voters = [text for text in voters if len(text) > depth and text[depth] == token]


@dataclass(frozen=True)
class _Output:
    request_id: str
    salt: str | None
    start: int  # in the texts of its salt
    end: int


class PastOutputs:
    """Outputs of requests that ended, oldest out first. Requests see those of their own salt."""

    def __init__(self, max_requests: int, max_tokens: int = MOST_CACHED_TOKENS) -> None:
        self.num_tokens = 0
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._by_salt: defaultdict[str | None, Occurrences] = defaultdict(Occurrences)
        self._outputs: deque[_Output] = deque()
        self._by_request: dict[str, _Output] = {}

    def of(self, salt: str | None) -> Occurrences | None:
        return self._by_salt.get(salt)

    def add(self, request_id: str, salt: str | None, token_ids: Sequence[int]) -> None:
        """Keep an output. The end of the prompt may precede it."""
        token_ids = token_ids[-min(MOST_OUTPUT_TOKENS, self._max_tokens - 1) :]
        if not token_ids or not self._max_requests:
            return
        texts = self._by_salt[salt]
        start = texts.end
        texts.begin_text()
        texts.extend(token_ids)
        output = _Output(request_id, salt, start, texts.end)
        self._outputs.append(output)
        self._by_request[request_id] = output
        self.num_tokens += output.end - start
        while len(self._outputs) > self._max_requests or self.num_tokens > self._max_tokens:
            self._drop_oldest()

    def forget(self, request_id: str) -> None:
        """The request runs again after a preemption, and will add its output once more."""
        output = self._by_request.pop(request_id, None)
        if output is not None:
            self._by_salt[output.salt].blank(output.start, output.end)

    def _drop_oldest(self) -> None:
        output = self._outputs.popleft()
        self.num_tokens -= output.end - output.start
        if self._by_request.get(output.request_id) is output:
            del self._by_request[output.request_id]
        texts = self._by_salt[output.salt]
        if texts.end == output.end:
            del self._by_salt[output.salt]
        else:
            texts.cut(output.end)


@dataclass(frozen=True)
class _SlotRequest:
    """What is kept of a request in a slot."""

    request_id: str
    salt: str | None
    start: int  # of what is kept of it when it ends: its output, and the end of its prompt


class SuffixDrafter(HostDrafter):
    def __init__(
        self, num_drafts: int, rules: PathRules, past: PastOutputs, min_chance: float = 0.0
    ) -> None:
        super().__init__(num_drafts)
        self.min_chance = min_chance
        self._rules = rules
        self._past = past
        self._requests: dict[int, _SlotRequest] = {}  # by slot
        self._texts: dict[int, Occurrences] = {}  # by slot: prompt and output

    def add(self, slot: int, request: NewRequest) -> None:
        super().add(slot, request)
        if not request.sampling.speculative:
            return
        self._past.forget(request.request_id)
        start = max(request.num_prompt_tokens - ANCHORS[0], 0)
        self._requests[slot] = _SlotRequest(request.request_id, request.cache_salt, start)

    def enter(self, slot: int, request: NewRequest) -> None:
        self._texts[slot] = texts = Occurrences()
        texts.extend(request.token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._texts[slot].extend(token_ids)

    def remove(self, slot: int) -> None:
        super().remove(slot)
        request, texts = self._requests.pop(slot, None), self._texts.pop(slot, None)
        if request is None:
            return
        token_ids = self.host_tokens(slot, request.start)  # also what no step drafted for
        if token_ids is None:
            token_ids = texts.since(request.start).tolist() if texts is not None else []
        self._past.add(request.request_id, request.salt, token_ids)

    def search(self, slot: int, num_drafts: int) -> Iterable[Iterator[Draft]]:
        own, past = self._texts[slot], self._past.of(self._requests[slot].salt)
        tail = own.tail(self._rules.max_tree_depth)
        yield self._rules.path(own, tail, OWN, num_drafts)
        if past is not None:
            yield self._rules.path(past, tail, PAST, num_drafts)
