"""Suffix drafts are what a search of the whole texts finds, and old texts leave nothing behind."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import NewRequest
from penstock.runner.drafters.chances import AGREED, ALONE, OWN, PAST, SPLIT, kind_of
from penstock.runner.drafters.occurrences import ANCHORS, MOST_PLACES, Occurrences
from penstock.runner.drafters.suffix import PastOutputs, PathRules, SuffixDrafter

Text = list[int]
texts = st.lists(st.integers(0, 2), max_size=30)


def common_suffix(one: Text, other: Text) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


def search(kept: list[Text], tail: Text, count: int, loops: bool) -> list[tuple[int, Text]]:
    """Match lengths and what followed, of the last occurrences of the longest anchor."""
    for length in ANCHORS:
        found = []
        for text in reversed(kept):
            for place in range(len(text) - 1, length - 1, -1):
                if len(tail) >= length and text[place - length : place] == tail[-length:]:
                    follows = text[place:] * (count if loops else 1)
                    found.append((common_suffix(text[:place], tail), follows[:count]))
        if found:
            return found[:MOST_PLACES]
    return []


def find(kept: Occurrences, tail: Text, count: int, loops: bool) -> list[tuple[int, Text]]:
    places = kept.find(array("i", tail))
    return [(length, kept.following(place, count, loops)) for length, place in places]


@given(pieces=st.lists(texts, max_size=5), depth=st.integers(1, 12), count=st.integers(1, 5))
def test_what_a_growing_text_holds_is_found(pieces: list[Text], depth: int, count: int) -> None:
    kept, text = Occurrences(), list[int]()
    for piece in pieces:
        kept.extend(piece)
        text += piece
        tail = text[-depth:]
        assert kept.tail(depth).tolist() == tail
        assert find(kept, tail, count, True) == search([text], tail, count, True)


@given(
    outputs=st.lists(st.tuples(st.integers(0, 6), texts, st.booleans()), max_size=12),
    max_requests=st.integers(0, 5),
    max_tokens=st.integers(20, 90),
    tail=texts,
)
def test_past_outputs_are_those_of_the_last_requests(
    outputs: list[tuple[int, Text, bool]], max_requests: int, max_tokens: int, tail: Text
) -> None:
    """Some run again, and only what they gave at last counts."""
    past = PastOutputs(max_requests, max_tokens)
    kept: list[tuple[int, Text, int]] = []  # request, its output, its size
    for request, text, runs_again in outputs:
        for _ in range(1 + runs_again):
            past.forget(str(request))
            kept = [(own, [] if own == request else old, size) for own, old, size in kept]
            past.add(str(request), None, text)
            last = text[-(max_tokens - 1) :]
            kept += [(request, last, len(last) + 1)] if text and max_requests else []
            while len(kept) > max_requests or sum(size for _, _, size in kept) > max_tokens:
                kept.pop(0)
    assert past.num_tokens == sum(size for _, _, size in kept)
    expected = search([text for _, text, _ in kept], tail, 4, False)
    index = past.of(None)
    assert (index is None) == (not kept)
    assert (find(index, tail, 4, False) if index is not None else []) == expected
    if index is not None:
        for length, (_, by_anchor, _) in zip(ANCHORS, index._indexes, strict=True):
            places = [(text, place) for _, text, _ in kept for place in range(length, len(text))]
            assert len(by_anchor) == len({(*text[at - length : at],) for text, at in places})


def walk(found: list[tuple[int, Text]], source: int, budget: int) -> list[tuple[int, int]]:
    """Count what followed the longest matches, after each beginning of the path."""
    longest = max((length for length, _ in found), default=0)
    follow = [text for length, text in found if length == longest]
    path: list[tuple[int, int]] = []
    while len(path) < budget:
        begun = [token for token, _ in path]
        same = [text for text in follow if text[: len(path)] == begun]
        votes = Counter(text[len(path)] for text in same if len(text) > len(path))
        if not votes:
            break
        token, count = votes.most_common(1)[0]
        agreement = ALONE if len(same) == 1 else AGREED if count == len(same) else SPLIT
        path.append((token, kind_of(source, agreement, longest + len(path))))
    return path


@given(
    kept=st.lists(texts, max_size=4),
    tail=texts,
    source=st.sampled_from([OWN, PAST]),
    depth=st.integers(8, 14),
    num_drafts=st.integers(1, 8),
)
def test_the_path_is_what_most_often_followed_the_longest_matches(
    kept: list[Text], tail: Text, source: int, depth: int, num_drafts: int
) -> None:
    index = Occurrences()
    for text in kept:
        index.begin_text()
        index.extend(text)
    tail = tail[-depth:]
    rules = PathRules(depth, 100.0)
    budget = min(num_drafts, depth - 1)
    longest = max((length for length, _ in find(index, tail, 1, False)), default=0)
    if longest:
        budget = min(num_drafts, max(depth - n for n in range(1, longest + 1)))
    found = find(index, tail, budget, source == OWN)
    path = rules.path(index, array("i", tail), source, num_drafts)
    assert list(path) == walk(found, source, budget)


def test_a_longer_match_is_worth_more_drafts_up_to_the_depth() -> None:
    rules, lengths = PathRules(max_tree_depth=8, max_spec_factor=1.0), []
    for length in range(2, 9):
        index = Occurrences()
        index.extend([*range(100, 100 + length), *range(9)])
        tail = array("i", range(100, 100 + length))
        lengths.append(len(list(rules.path(index, tail, OWN, 9))))
    assert lengths == [2, 3, 4, 4, 4, 4, 4]


def drafts_of(drafter: SuffixDrafter, slot: int) -> Text:
    """Those of the first path."""
    paths = [[token for token, _ in path] for path in drafter.search(slot, 4)]
    return next((path for path in paths if path), [])


def enter(drafter: SuffixDrafter, slot: int, request_id: str, tokens: Text, salt: str) -> None:
    request = NewRequest(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=1,
        num_computed_tokens=0,
        params=SamplingParams(),
        seed=0,
        cache_salt=salt,
    )
    drafter.add(slot, request)
    drafter.enter(slot, request)


def test_requests_see_past_outputs_of_their_own_salt_only() -> None:
    drafter = SuffixDrafter(4, PathRules(24, 1.0), PastOutputs(10))
    enter(drafter, 0, "a", [1, 2, 3, 4, 5, 6], "mine")
    drafter.remove(0)
    enter(drafter, 0, "b", [9, 2, 3], "mine")
    enter(drafter, 1, "c", [9, 2, 3], "yours")
    assert drafts_of(drafter, 0) == [4, 5]
    assert drafts_of(drafter, 1) == []


@pytest.mark.parametrize("max_requests", [0, 1])
def test_a_limit_of_zero_requests_keeps_none(max_requests: int) -> None:
    drafter = SuffixDrafter(4, PathRules(24, 1.0), PastOutputs(max_requests))
    enter(drafter, 0, "a", [1, 2, 3, 4], "")
    drafter.remove(0)
    enter(drafter, 0, "b", [9, 2, 3], "")
    assert drafts_of(drafter, 0) == [4][:max_requests]


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    past = PastOutputs(3)
    for number in range(50):
        past.add(str(number), f"tenant {number}", [1, 2, 3, 4])
    assert len(past._by_salt) == len(past._by_request) == len(past._outputs) == 3
