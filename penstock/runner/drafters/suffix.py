"""Suffix decoding: drafts what most often followed the last tokens, here and in past outputs.

The method is that of SuffixDecoding and of vLLM's `suffix`: the longer the match, the more drafts;
the path is that of the most frequent tokens, as long as it is probable enough.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.protocol.step import NewRequest
from penstock.runner.drafter import Drafts, DraftStep
from penstock.runner.drafters.host import HostDrafter
from penstock.runner.drafters.occurrences import ANCHORS, Occurrences
from penstock.runner.tables import RequestTables

MOST_CACHED_TOKENS = 1 << 19  # of past outputs; each takes about 250 bytes
MOST_OUTPUT_TOKENS = 1 << 13  # of one past output: its last ones

Found = list[tuple[int, list[int]]]  # the length of each match, and what followed it


class PathRules:
    """How many drafts a match is worth, and which."""

    def __init__(self, max_tree_depth: int, max_spec_factor: float, min_token_prob: float) -> None:
        self.max_tree_depth = max_tree_depth
        self._min_token_prob = min_token_prob
        self._budgets = [0]  # by the length of the match, of which a part may count
        for length in range(1, max_tree_depth + 1):
            own = min(int(length * max_spec_factor), max_tree_depth - length)
            self._budgets.append(max(own, self._budgets[-1]))

    def choose(self, found: Found, num_drafts: int) -> tuple[float, list[int]]:
        """The drafts with the highest expected number of accepted ones, and that number.

        For each length, all matches of at least this length vote. The most frequent next token is
        the draft, and its share of the votes is its probability. Of equals, that of the longest
        match counts, and then that of the most recent one.
        """
        ordered = sorted(found, key=lambda item: -item[0])
        best: tuple[float, list[int]] = (0.0, [])
        texts = [text for _, text in ordered]
        for index, (length, _) in enumerate(ordered):
            if index + 1 < len(ordered) and ordered[index + 1][0] == length:
                continue
            budget = min(self._budgets[length], num_drafts)
            if budget <= best[0]:
                break  # and shorter matches are worth no more drafts
            score, path = self._walk(texts[: index + 1], budget)
            if score > best[0]:
                best = score, path
        return best

    def _walk(self, voters: list[list[int]], budget: int) -> tuple[float, list[int]]:
        score, probability, path = 0.0, 1.0, list[int]()
        while len(path) < budget:
            depth = len(path)
            votes = [text[depth] for text in voters if len(text) > depth]
            if not votes:
                break
            token = max(votes, key=votes.count) if len(votes) > 2 else votes[0]
            count = votes.count(token)
            probability *= count / len(voters)
            if probability < self._min_token_prob:
                break
            score += probability
            path.append(token)
            if count < len(voters):
                voters = [text for text in voters if len(text) > depth and text[depth] == token]
        return score, path


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
class _Request:
    """What is kept of a request in a slot."""

    request_id: str
    salt: str | None
    start: int  # of what is kept of it when it ends: its output, and the end of its prompt


class SuffixDrafter(HostDrafter):
    def __init__(self, num_drafts: int, rules: PathRules, past: PastOutputs) -> None:
        super().__init__(num_drafts)
        self._rules = rules
        self._past = past
        self._requests: dict[int, _Request] = {}  # by slot
        self._texts: dict[int, Occurrences] = {}  # by slot: prompt and output
        self._tables: RequestTables | None = None

    def add(self, slot: int, request: NewRequest) -> None:
        super().add(slot, request)
        if not request.sampling.speculative:
            return
        self._past.forget(request.request_id)
        start = max(request.num_prompt_tokens - ANCHORS[0], 0)
        self._requests[slot] = _Request(request.request_id, request.cache_salt, start)

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
        tables, token_ids = self._tables, list[int]()
        if tables is not None and tables.device.type == "cpu":  # also what no step drafted for
            end = int(tables.num_tokens[slot])
            token_ids = tables.token_ids.numpy()[slot, request.start : end].tolist()
        elif texts is not None:
            token_ids = texts.since(request.start).tolist()
        self._past.add(request.request_id, request.salt, token_ids)

    def propose(self, step: DraftStep) -> Drafts:
        self._tables = step.tables
        return super().propose(step)

    def draft(self, slot: int, num_drafts: int) -> list[int]:
        own, past = self._texts[slot], self._past.of(self._requests[slot].salt)
        tail = own.tail(self._rules.max_tree_depth)
        found = [(n, own.following(at, num_drafts, loops=True)) for n, at in own.find(tail)]
        score, drafts = self._rules.choose(found, num_drafts)
        if past is None or score >= num_drafts:
            return drafts
        found = [(n, past.following(at, num_drafts, loops=False)) for n, at in past.find(tail)]
        other, others = self._rules.choose(found, num_drafts)
        return others if other > score else drafts
