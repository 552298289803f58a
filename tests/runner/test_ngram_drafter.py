"""N-gram drafts are what a search of the whole text finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.runner.drafters.ngram import NgramIndex


def search(tokens: list[int], shortest: int, longest: int, num_drafts: int) -> list[int]:
    """The drafts after the longest suffix that occurred before, the last time that it did."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == suffix:
                text = list(tokens)
                for position in range(start + length, start + length + num_drafts):
                    text.append(text[position])
                return text[len(tokens) :]
    return []


def draft(index: NgramIndex, num_drafts: int) -> list[int]:
    match = index.find()
    return [] if match is None else index.following(match[1], num_drafts)


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8),
    lengths=st.tuples(st.integers(1, 4), st.integers(0, 4)),
    num_drafts=st.integers(1, 7),
)
def test_the_index_finds_what_a_search_of_the_whole_text_finds(
    pieces: list[list[int]], lengths: tuple[int, int], num_drafts: int
) -> None:
    shortest, longest = lengths[0], lengths[0] + lengths[1]
    index, tokens = NgramIndex(shortest, longest), list[int]()
    for piece in pieces:
        index.extend(piece)
        tokens += piece
        assert draft(index, num_drafts) == search(tokens, shortest, longest, num_drafts)


def test_the_longest_match_counts_and_of_those_the_last() -> None:
    index = NgramIndex(1, 3)
    index.extend([1, 2, 3, 4, 0, 2, 3, 5, 0, 2, 3, 6, 9, 1, 2, 3])
    assert draft(index, 2) == [4, 0]
    index.extend([0, 2, 3])
    assert draft(index, 2) == [6, 9]


def test_a_text_that_ends_in_a_loop_goes_on_in_it() -> None:
    index = NgramIndex(2, 4)
    index.extend([5, 6, 7, 5, 6])
    assert draft(index, 7) == [7, 5, 6, 7, 5, 6, 7]


def test_nothing_is_drafted_where_nothing_repeats() -> None:
    index = NgramIndex(2, 4)
    assert draft(index, 3) == []
    index.extend([1, 2, 3, 1])
    assert draft(index, 3) == []


def test_a_match_that_goes_on_counts_with_all_its_tokens() -> None:
    index = NgramIndex(2, 3)
    index.extend([1, 2, 3, 4, 5, 6, 7, 1, 2])
    lengths = []
    for piece in ([], [3], [4, 5], [9, 4, 5]):
        index.extend(piece)
        match = index.find()
        assert match is not None
        lengths.append(match[0])
    assert lengths == [2, 3, 5, 2]
