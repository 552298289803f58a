"""DraftChances: how often drafts hold, by the kind of match that they come from."""

from __future__ import annotations

OWN, PAST = 0, 1  # where a match was found: in the request itself, or in past outputs
ALONE, AGREED, SPLIT = range(3)  # one match; several that go on alike; several that do not
_PRIORS = (  # by ALONE, AGREED, SPLIT and the length of the match: see `_LENGTHS`
    (0.5, 0.6, 0.7, 0.75, 0.85),
    (0.8, 0.8, 0.85, 0.9, 0.95),
    (0.15, 0.15, 0.15, 0.15, 0.15),
)
_LENGTHS = (0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4)  # class by matched tokens: up to 2, 3, 5, 9, more
_NUM_LENGTHS = len(_PRIORS[0])
_PRIOR_WEIGHT = 6.0  # drafts that a prior counts for
_DECAY = 0.98  # of counts, per draft of their kind


def kind_of(source: int, agreement: int, length: int) -> int:
    """The kind of a draft that follows `length` matched tokens, those of earlier drafts included.

    One number, so that it can be an index.
    """
    row = source * len(_PRIORS) + agreement
    return row * _NUM_LENGTHS + _LENGTHS[min(length, len(_LENGTHS) - 1)]


class DraftChances:
    """The probability that a draft holds, by its kind, given that those before it did.

    It depends only on the tokens of the requests, so it is the same on all ranks.
    """

    def __init__(self) -> None:
        self._priors = [prior for _ in (OWN, PAST) for row in _PRIORS for prior in row]
        self.by_kind = list(self._priors)
        self._held = [0.0] * len(self._priors)  # decayed counts
        self._seen = [0.0] * len(self._priors)

    def record(self, kind: int, holds: bool) -> None:
        self._held[kind] = held = self._held[kind] * _DECAY + holds
        self._seen[kind] = seen = self._seen[kind] * _DECAY + 1
        prior = self._priors[kind] * _PRIOR_WEIGHT
        self.by_kind[kind] = (held + prior) / (seen + _PRIOR_WEIGHT)
