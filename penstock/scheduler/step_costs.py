"""StepCosts: measures how long decode steps take, by their rows and the drafts they propose."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

# Steps until a time counts, which is their median: the first two may compile or capture something,
# and one that is already in flight then seems to take no time.
NUM_TRIALS = 5
WEIGHT = 0.05  # of a new time in the estimate: a device that gets hot is slow for some ten steps
MAX_CHANGE = 1.5  # by which one step can differ from the estimate, as a factor: the rest is noise
EXPIRES_AFTER = 2000  # recorded steps after which an estimate is tried again
LEAST_PROMPT_ROWS = 256  # of a step that shows what a row takes
PROMPT_DECAY = 0.8  # of the sums over such steps
PROMPT_WEIGHT = 64.0  # rows of drafts that they count for


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

    def __init__(self, least_prompt_rows: int = LEAST_PROMPT_ROWS) -> None:
        self._least_prompt_rows = least_prompt_rows
        self._estimates: dict[tuple[int, int], _Estimate] = {}
        self._num_records = 0
        self._prompt_seconds = self._prompt_rows = self._prompt_steps = 0.0  # decayed sums

    def record_prompts(self, num_rows: int, seconds: float) -> None:
        """A step computed prompts. Rows of drafts take about as long as its rows, or longer.

        A step's time may count for the next one in flight, so only sums over steps mean something.
        """
        if num_rows >= self._least_prompt_rows:
            self._prompt_seconds = self._prompt_seconds * PROMPT_DECAY + seconds
            self._prompt_rows = self._prompt_rows * PROMPT_DECAY + num_rows
            self._prompt_steps = self._prompt_steps * PROMPT_DECAY + 1

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
        known = self._known()
        alike = {key for key in known if key[1] == num_drafts}
        below = [key for key in alike if key[0] < rows]
        above = [key for key in alike if key[0] > rows]
        smaller = [key for key in known if key[0] <= rows and key[1] <= num_drafts]
        if not (below and above):
            below, above = smaller, [k for k in known if k[0] > rows and k[1] >= num_drafts]
        if below and above:
            least, most = max(below), min(above)
            share = (rows - least[0]) / (most[0] - least[0])
            return known[least] + share * (known[most] - known[least])
        if not smaller:
            return min(known.values(), default=1.0)
        slowest = max(known[key] for key in smaller)
        nearest = max(smaller, key=lambda key: (key[0], known[key]))
        more = (rows - nearest[0]) * self._seconds_per_prompt_row(known)
        return max(slowest, known[nearest] + more)

    def knows(self, num_rows: int, num_drafts: int) -> bool:
        estimate = self._estimates.get((_bucket(num_rows), num_drafts))
        return estimate is not None and self._counts(estimate)

    def forget_old(self, num_rows: int, num_drafts: int, max_age: int) -> None:
        """Forget the time of such a step if none was among the last `max_age` recorded ones."""
        key = (_bucket(num_rows), num_drafts)
        known = self._estimates.get(key)
        if known is not None and self._num_records - known.recorded_at > max_age:
            del self._estimates[key]

    def seconds_per_row(self, num_rows: int, most_rows: int, num_drafts: int) -> float:
        """The time that a row adds to a step of `num_rows`, up to `most_rows`.

        It is an average over the measured steps, because the first row more may cost the most. Rows
        of prompts count, too. Times vary, but a row adds no less than one of a prompt does, and no
        more than its share of the step.
        """
        known = self._known()
        of_prompt = self._seconds_per_prompt_row(known)
        rows = PROMPT_WEIGHT if of_prompt else 0.0
        seconds = rows * of_prompt
        base = self.seconds(num_rows, num_drafts)
        for (of_rows, of_drafts), own in known.items():
            if of_drafts == num_drafts and _bucket(num_rows) < of_rows <= most_rows:
                num_trials = self._estimates[of_rows, of_drafts].num_trials
                seconds += num_trials * (own - base)
                rows += num_trials * (of_rows - num_rows)
        found = seconds / rows if rows else 0.0
        return min(max(found, of_prompt), base / num_rows)

    def _known(self) -> dict[tuple[int, int], float]:
        return {key: each.seconds for key, each in self._estimates.items() if self._counts(each)}

    def _seconds_per_prompt_row(self, known: dict[tuple[int, int], float]) -> float:
        """Beyond what the shortest step takes, which reads the weights, too."""
        if not self._prompt_rows:
            return 0.0
        seconds = self._prompt_seconds - self._prompt_steps * min(known.values(), default=0.0)
        return max(seconds, 0.0) / self._prompt_rows

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
