"""Suffix drafts on a GPU against a plain computation of the same rules."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.config import SpeculativeSettings
from penstock.runner.drafters import make_drafter

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton import suffix
from penstock.runner.drafters.device_suffix import DeviceSuffixDrafter, salt_number

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTH = 24


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few places a program: several programs have places, some have none."""
    for name, size in (("CHUNK", 4), ("OWN_SPLITS", 2), ("PAST_SPLITS", 3)):
        monkeypatch.setattr(suffix, name, size)


@dataclass(frozen=True)
class Text:
    """A request that ends: its tokens, how many of them are the prompt, whose it is."""

    tokens: list[int]
    num_prompt: int = 1
    salt: int = 0


@dataclass
class PlainPast:
    capacity: int
    max_outputs: int
    tokens: list[int] = field(default_factory=list)  # all that were ever appended
    salts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def append(self, text: Text) -> None:
        size = min(suffix.MOST_OUTPUT_TOKENS, self.capacity - 1)
        kept = text.tokens[max(text.num_prompt - suffix.CONTEXT, 0) :][-size:]
        self.starts.append(len(self.tokens))
        self.tokens += [*kept, -1]
        self.salts += [text.salt] * (len(kept) + 1)

    @property
    def low(self) -> int:
        return max(*self.starts[-self.max_outputs :][:1], len(self.tokens) - self.capacity)


def matched(tokens: list[int], low: int, end: int, own: list[int], longest: int) -> int:
    """The length of the match that ends before `end`."""
    count = 0
    while count < min(longest, len(own)) and end - count - 1 >= low:
        if tokens[end - count - 1] != own[-count - 1]:
            break
        count += 1
    return count


def plain_drafts(own: Text, past: PlainPast, num_drafts: int, longest: int) -> list[int]:
    best: dict[tuple[bool, int], tuple[int, int]] = {}  # by program: length and position
    texts = [(True, own.tokens, 0, suffix.OWN_SPLITS)]
    if past.starts:
        texts.append((False, past.tokens, past.low, suffix.PAST_SPLITS))
    for is_own, tokens, low, splits in texts:
        for end in range(low + 1, len(tokens)):
            length = matched(tokens, low, end, own.tokens, longest)
            if length < suffix.SHORTEST:
                continue
            if not is_own and (tokens[end] < 0 or past.salts[end] != own.salt):
                continue
            program = is_own, (end - low) // suffix.CHUNK % splits
            best[program] = max(best.get(program, (0, 0)), (length, end))
    most = max((length for length, _ in best.values()), default=0)
    voters = [(is_own, end) for (is_own, _), (length, end) in best.items() if length == most]
    drafts = []
    for index in range(num_drafts):
        after: dict[tuple[bool, int], int] = {}
        for is_own, end in voters:
            if is_own:
                after[is_own, end] = own.tokens[end + index % (len(own.tokens) - end)]
            elif end + index < len(past.tokens) and past.tokens[end + index] >= 0:
                after[is_own, end] = past.tokens[end + index]
        votes = list(after.values())
        if votes:
            place = max(after, key=lambda each: (votes.count(after[each]), each))
            drafts.append(after[place])
        else:
            drafts.append(drafts[-1] if drafts else own.tokens[-1])
        voters = [each for each in after if after[each] == drafts[-1]]
    return drafts


def check(
    ended: list[Text],
    running: list[Text],
    num_drafts: int,
    longest: int,
    capacity: int = 1000,
    max_outputs: int = 100,
) -> list[list[int]]:
    """Texts are in every second slot. What is behind them must not matter."""
    ring = suffix.PastRing.make(capacity, max_outputs, DEVICE)
    plain = PlainPast(capacity, max_outputs)
    table = torch.full((2 * len(running), LENGTH), 1, dtype=torch.int32, device=DEVICE)
    num_tokens, num_prompt = (
        torch.zeros(2 * len(running), dtype=torch.int32, device=DEVICE) for _ in range(2)
    )
    salts = torch.zeros(2 * len(running), dtype=torch.int64, device=DEVICE)

    def write(slot: int, text: Text) -> None:
        table[slot, : len(text.tokens)] = torch.tensor(text.tokens, dtype=torch.int32)
        num_tokens[slot], num_prompt[slot] = len(text.tokens), text.num_prompt
        salts[slot] = text.salt

    for count, text in enumerate(ended):
        write(0, text)
        suffix.append_output(ring, table, num_tokens, num_prompt, 0, text.salt, count)
        plain.append(text)
    for row, text in enumerate(running):
        write(2 * row, text)
    slots = torch.cat([torch.arange(len(running)) * 2, torch.tensor([-1])]).to(DEVICE)
    found = suffix.suffix_drafts(slots, table, num_tokens, salts, ring, num_drafts, longest)
    drafts: list[list[int]] = found[: len(running)].tolist()
    assert drafts == [plain_drafts(text, plain, num_drafts, longest) for text in running]
    return drafts


def test_what_most_often_followed_wins() -> None:
    ended = [Text([5, 6, 1, 2, 7]), Text([5, 6, 1, 2, 8]), Text([5, 6, 1, 2, 8, 9])]
    assert check(ended, [Text([3, 1, 2])], 3, 8) == [[8, 9, 9]]


def test_the_longest_match_wins_wherever_it_is() -> None:
    past = [Text([4, 1, 2, 3, 7, 7])]
    assert check(past, [Text([1, 2, 3, 8, 8, 4, 1, 2, 3])], 2, 8) == [[7, 7]]
    assert check(past, [Text([0, 1, 2, 3, 8, 8, 0, 1, 2, 3])], 2, 8) == [[8, 8]]


def test_outputs_of_others_are_not_seen() -> None:
    past = [Text([1, 2, 3, 4], salt=5)]
    assert check(past, [Text([9, 1, 2], salt=5), Text([9, 1, 2], salt=6)], 2, 8) == [[3, 4], [2, 2]]


def test_prompts_are_kept_as_far_as_they_lead_to_the_output() -> None:
    past = [Text([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], num_prompt=10)]
    assert check(past, [Text([0, 1, 2]), Text([0, 9, 10])], 1, 8) == [[2], [11]]


texts = st.lists(st.integers(0, 2), min_size=1, max_size=LENGTH).flatmap(
    lambda tokens: st.builds(Text, st.just(tokens), st.integers(1, len(tokens)), st.integers(0, 1))
)


@settings(max_examples=12)
@given(
    st.lists(texts, max_size=5),
    st.lists(texts, min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(2, 8),
    st.integers(8, 90),
    st.integers(1, 4),
)
@example([Text([0, 1, 2, 0, 1]), Text([0, 1, 1])], [Text([2, 0, 1])], 3, 4, 8, 1)
def test_drafts_are_those_of_the_plain_rules(
    ended: list[Text],
    running: list[Text],
    num_drafts: int,
    longest: int,
    capacity: int,
    max_outputs: int,
) -> None:
    """Also where outputs leave the ring, by their number or their length."""
    check(ended, running, num_drafts, longest, capacity, max_outputs)


def test_a_gpu_has_a_drafter_of_its_own() -> None:
    settings = SpeculativeSettings.parse({"method": "suffix", "num_speculative_tokens": 4})
    drafter = make_drafter(settings, {"vocab_size": 99}, on_gpu=True)
    assert isinstance(drafter, DeviceSuffixDrafter)
    assert (drafter.num_drafts, drafter.is_on_host) == (4, False)
    assert not isinstance(make_drafter(settings, {"vocab_size": 99}), DeviceSuffixDrafter)


def test_salts_are_told_apart() -> None:
    numbers = {salt_number(salt) for salt in (None, "", "a", "b", "a" * 100)}
    assert len(numbers) == 5
    assert all(0 <= number < 2**63 for number in numbers)
