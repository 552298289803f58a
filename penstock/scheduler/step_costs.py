"""StepCosts: measures how long decode steps take, by their rows and the drafts they propose."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

# Steps until a time counts, which is their median: the first may compile or capture something, and
# the second, already in flight, then seems to take no time.
NUM_TRIALS = 3
WEIGHT = 0.2  # of a new time in the estimate
MAX_CHANGE = 1.5  # by which one step can differ from the estimate, as a factor: the rest is noise
EXPIRES_AFTER = 2000  # recorded steps after which an estimate is tried again
LEAST_PROMPT_ROWS = 256  # of a step that shows what a row takes: with fewer, the weights do
PROMPT_DECAY = 0.8  # of the sums over such steps


@dataclass
class _Estimate:
    seconds: float
    recorded_at: int  # number of the record
    num_trials: int = 1
    trials: list[float] = field(default_factory=list)  # the first ones

    def add(self, seconds: float) -> None:
        self.num_trials += 1
        if self.num_trials <= NUM_TRIALS:
            self.trials.append(seconds)
            self.seconds = median(self.trials)
            return
        change = min(max(seconds / self.seconds, 1 / MAX_CHANGE), MAX_CHANGE)
        self.seconds *= 1 + WEIGHT * (change - 1)


class StepCosts:
    """Times of steps. Those that are not known yet are assumed to be short, so they get tried."""

    def __init__(self) -> None:
        self._estimates: dict[tuple[int, int], _Estimate] = {}
        self._num_records = 0
        self._prompt_seconds = self._prompt_rows = 0.0  # decayed sums

    def record_prompts(self, num_rows: int, seconds: float) -> None:
        """A step computed prompts. What its rows took is the most that rows of drafts take.

        A step's time may count for the next one in flight, so only sums over steps mean something.
        """
        if num_rows >= LEAST_PROMPT_ROWS:
            self._prompt_seconds = self._prompt_seconds * PROMPT_DECAY + seconds
            self._prompt_rows = self._prompt_rows * PROMPT_DECAY + num_rows

    def record(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step computed `num_rows` rows and proposed `num_drafts` drafts for each request."""
        self._num_records += 1
        key = (_bucket(num_rows), num_drafts)
        estimate = self._estimates.get(key)
        if estimate is None or self._is_stale(estimate):
            seconds = max(seconds, 1e-6)
            self._estimates[key] = _Estimate(seconds, self._num_records, trials=[seconds])
            return
        estimate.add(max(seconds, 1e-6))
        estimate.recorded_at = self._num_records

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        """The time of such a step.

        Unknown: between those of its neighbours, or that of the nearest smaller step and what
        rows of prompts take, or the least of all.
        """
        rows = _bucket(num_rows)
        if self.knows(num_rows, num_drafts):
            return self._estimates[rows, num_drafts].seconds
        known = {key: each.seconds for key, each in self._estimates.items() if self._counts(each)}
        alike = sorted(key for key in known if key[1] == num_drafts)
        if alike and alike[0][0] < rows < alike[-1][0]:
            below = max(key for key in alike if key[0] < rows)
            above = min(key for key in alike if key[0] > rows)
            share = (rows - below[0]) / (above[0] - below[0])
            return known[below] + share * (known[above] - known[below])
        smaller = [key for key in known if key[0] <= rows and key[1] <= num_drafts]
        if not smaller:
            return min(known.values(), default=1.0)
        slowest = max(known[key] for key in smaller)
        nearest = max(smaller, key=lambda key: (key[0], known[key]))
        per_row = self._prompt_seconds / self._prompt_rows if self._prompt_rows else 0.0
        return max(slowest, known[nearest] + (rows - nearest[0]) * per_row)

    def knows(self, num_rows: int, num_drafts: int) -> bool:
        estimate = self._estimates.get((_bucket(num_rows), num_drafts))
        return estimate is not None and self._counts(estimate)

    def seconds_per_row(self, num_rows: int, most_rows: int, num_drafts: int) -> float:
        """The time that a row adds to a step of `num_rows`, up to `most_rows`. Unknown: 0.

        It is an average over the measured steps, because the first row more may cost the most.
        """
        base, seconds, rows = self.seconds(num_rows, num_drafts), 0.0, 0
        for (of_rows, of_drafts), known in self._estimates.items():
            is_larger = _bucket(num_rows) < of_rows <= most_rows
            if is_larger and of_drafts == num_drafts and self._counts(known):
                seconds += known.num_trials * (known.seconds - base)
                rows += known.num_trials * (of_rows - num_rows)
        return max(seconds, 0.0) / rows if rows else 0.0

    def _counts(self, estimate: _Estimate) -> bool:
        return estimate.num_trials >= NUM_TRIALS and not self._is_stale(estimate)

    def _is_stale(self, estimate: _Estimate) -> bool:
        return self._num_records - estimate.recorded_at > EXPIRES_AFTER


def _bucket(num_rows: int) -> int:
    """Group similar numbers of rows: one by one up to 16, then about an eighth apart."""
    if num_rows <= 16:
        return num_rows
    width = 1 << (num_rows.bit_length() - 4)
    return -(-num_rows // width) * width
