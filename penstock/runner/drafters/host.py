"""HostDrafter: the base of drafters of a CPU, which look at one request at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.protocol.step import NewRequest
from penstock.runner.drafter import Drafter, Drafts, DraftStep
from penstock.runner.drafters.chances import DraftChances
from penstock.runner.tables import RequestTables

Draft = tuple[int, int]  # the token and its `kind_of`
Path = list[Draft]  # drafts that follow each other
MOST_CHANCE = 0.99  # of a draft
FEW_PAY = 0.5  # few drafts do if they must hold with a higher probability
OWN_WEIGHT = 8.0  # drafts after which a request's own acceptance counts as much as that of all
OWN_DECAY = 0.9  # of a request's counts, per draft
PATIENCE = 8  # searches in vain, after which a request is searched in every second step, then third
LONGEST_REST = 3  # steps between two searches of a request
PATIENCE_IF_FEW_PAY, LONGEST_REST_IF_FEW_PAY = 2, 8


@dataclass
class _Request:
    """A request that the drafter follows."""

    num_seen: int  # tokens that `extend` was given
    looked_at: list[Path] = field(default_factory=list)  # by the last search
    proposed: Path = field(default_factory=list)  # one of them, or the beginning of one
    held: float = 0.0  # proposed drafts that held, decayed
    expected: float = 0.0  # as many as were expected to hold
    num_in_vain: int = 0  # searches in a row that found nothing to propose
    num_resting: int = 0  # steps until the next search

    def rests(self) -> bool:
        """Whether this step is left out: searches cost time, and the last ones were in vain."""
        self.num_resting -= 1
        return self.num_resting >= 0

    def count_search(self, least: float) -> None:
        self.num_in_vain = 0 if self.proposed else self.num_in_vain + 1
        patience, longest = PATIENCE, LONGEST_REST
        if least > FEW_PAY:
            patience, longest = PATIENCE_IF_FEW_PAY, LONGEST_REST_IF_FEW_PAY
        self.num_resting = min(self.num_in_vain // patience, longest)


class HostDrafter(Drafter):
    """Follows the tokens of each request, and proposes the drafts that pay.

    It looks at a request only in steps that draft. What it missed comes with the next such step.
    What it finds is compared with the tokens that come, also where it was not proposed. So it
    knows how often drafts of each kind hold. Drafts are a function of the tokens and the plans, so
    all ranks propose the same.
    """

    knows_chances = True
    min_chance = 0.0  # drafts that hold with a lower probability are never proposed

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._chances = DraftChances()
        self._entered: dict[int, NewRequest] = {}  # by slot: requests that were not looked at yet
        self._followed: dict[int, _Request] = {}  # by slot
        self._tables: RequestTables | None = None
        self._host_tokens: npt.NDArray[np.int32] | None = None  # the tables', if on the host
        self._host_lengths: npt.NDArray[np.int32] | None = None

    @abstractmethod
    def enter(self, slot: int, request: NewRequest) -> None:
        """The first step that drafts for this request. Its known tokens are in `request`."""

    @abstractmethod
    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """The request's next tokens."""

    @abstractmethod
    def search(self, slot: int, num_drafts: int) -> Iterable[Iterator[Draft]]:
        """What may come next: paths of at most `num_drafts` drafts and their kinds.

        A path is read only as far as its drafts are likely to hold.
        """

    def add(self, slot: int, request: NewRequest) -> None:
        if request.sampling.speculative:
            self._entered[slot] = request

    def remove(self, slot: int) -> None:
        self._entered.pop(slot, None)
        self._followed.pop(slot, None)

    def propose(self, step: DraftStep) -> Drafts:
        if step.tables is not self._tables:
            self._attach(step.tables)
        slots = step.host_slots.tolist()
        counts = np.zeros(len(slots), dtype=np.int64)
        least = max(step.least_chance, self.min_chance)
        tokens, lengths = self._host_tokens, self._host_lengths
        if least >= MOST_CHANCE:
            return Drafts(None, counts)  # no draft can pay: a search would be in vain
        assert tokens is not None, "a GPU has drafters of its own"
        assert lengths is not None
        for row, slot in enumerate(slots):
            request = self._request_in(slot)
            if request is None or request.rests():
                continue
            end = lengths.item(slot)
            new = tokens[slot, request.num_seen : end].tolist()
            drafts = self._draft(slot, request, new, step.num_drafts, least)
            if drafts:
                counts[row] = len(drafts)
                tokens[slot, end : end + len(drafts)] = drafts
        return Drafts(None, counts)

    def host_tokens(self, slot: int, start: int) -> list[int] | None:
        """A request's tokens from `start` on. None before the first step that drafts."""
        if self._host_tokens is None or self._host_lengths is None:
            return None
        token_ids: list[int] = self._host_tokens[slot, start : self._host_lengths[slot]].tolist()
        return token_ids

    def _attach(self, tables: RequestTables) -> None:
        self._tables = tables
        self._host_tokens = tables.token_ids.numpy()
        self._host_lengths = tables.num_tokens.numpy()

    def _request_in(self, slot: int) -> _Request | None:
        request = self._followed.get(slot)
        if request is None and (entered := self._entered.pop(slot, None)) is not None:
            self.enter(slot, entered)
            self._followed[slot] = request = _Request(len(entered.token_ids))
        return request

    def _draft(
        self, slot: int, request: _Request, new: list[int], num_drafts: int, least: float
    ) -> list[int]:
        """The drafts with the most expected tokens, each worth `least` tokens or more."""
        self._learn(request, new)
        self.extend(slot, new)
        request.num_seen += len(new)
        chances = self._chances.by_kind
        factor = (request.held + OWN_WEIGHT) / (request.expected + OWN_WEIGHT)
        request.looked_at, request.proposed, most = [], [], 0.0
        for path in self.search(slot, num_drafts):
            looked_at: Path = []
            count, chance, gain = 0, 1.0, 0.0
            for draft in path:
                looked_at.append(draft)
                chance *= min(chances[draft[1]] * factor, MOST_CHANCE)
                if chance <= least:
                    break
                count, gain = count + 1, gain + chance - least
            if looked_at:
                request.looked_at.append(looked_at)
            if gain > most:
                request.proposed, most = looked_at[:count], gain
            if count == num_drafts:
                break
        request.count_search(least)
        return [token for token, _ in request.proposed]

    def _learn(self, request: _Request, new: list[int]) -> None:
        """Compare what the last search found with what came."""
        if not request.looked_at:
            return
        for (token, kind), actual in zip(request.proposed, new, strict=False):
            request.held = request.held * OWN_DECAY + (token == actual)
            request.expected = request.expected * OWN_DECAY + self._chances.by_kind[kind]
            if token != actual:
                break
        for path in request.looked_at:
            for (token, kind), actual in zip(path, new, strict=False):
                self._chances.record(kind, token == actual)
                if token != actual:
                    break
