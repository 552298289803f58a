"""Stop strings are found wherever the text is cut, and never shown in part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.text.stops import StopScanner, StopStrings

texts = st.text(alphabet="abc", max_size=12)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)
chunk_lists = st.lists(texts, max_size=8)


def oracle(text: str, stops: list[str], free: int) -> tuple[str, int] | None:
    """The stop that ends first after the first `free` characters, and where it ends."""
    for end in range(free + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return stop, end
    return None


@given(chunk_lists, stop_lists, st.booleans(), st.integers(0, 4))
def test_any_chunks_give_what_a_search_of_the_whole_text_gives(
    chunks: list[str], stops: list[str], include: bool, num_free_chunks: int
) -> None:
    text, free = "".join(chunks), len("".join(chunks[:num_free_chunks]))
    expected = oracle(text, stops, free)
    scanner = StopScanner(StopStrings(stops), include)
    shown = ""
    for index, chunk in enumerate(chunks):
        shown += scanner.feed(chunk, may_stop=index >= num_free_chunks)
        if scanner.matched is not None:
            break
    if expected is None:
        assert scanner.matched is None
        assert shown + scanner.flush() == text
    else:
        stop, end = expected
        assert scanner.matched == stop
        assert shown == text[: end if include else end - len(stop)]
        assert scanner.flush() == ""


@given(texts, stop_lists)
def test_exactly_what_could_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops))
    shown = ""
    for end, char in enumerate(text, start=1):
        shown += scanner.feed(char, may_stop=False)
        possible = [n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])]
        assert len(shown) == end - max(possible)


def test_of_stops_that_end_together_the_first_in_the_list_wins() -> None:
    for stops in (["b", "ab"], ["ab", "b"]):
        scanner = StopScanner(StopStrings(stops))
        scanner.feed("xab")
        assert scanner.matched == stops[0]


def test_text_that_was_free_to_hold_a_stop_string_cannot_stop_later() -> None:
    scanner = StopScanner(StopStrings(["END"]))
    assert scanner.feed("an END", may_stop=False) == "an END"
    assert scanner.feed(" and on") == " and on"
    assert scanner.matched is None


def test_nothing_is_held_back_where_the_stop_string_is_shown_anyway() -> None:
    scanner = StopScanner(StopStrings(["END"]), include=True)
    assert scanner.feed("the EN") == "the EN"
    assert scanner.feed("D. More") == "D"


def test_each_character_costs_a_bounded_number_of_steps() -> None:
    """Fallbacks only undo earlier steps: at most two transitions a character on the whole."""

    class Counting(StopStrings):
        lookups = 0

        def step(self, node: int, char: str) -> int:
            while node != 0 and char not in self.children[node]:
                node = self.fallback[node]
                self.lookups += 1
            self.lookups += 1
            return self.children[node].get(char, 0)

    stops = Counting(["a" * 50 + "b", "a" * 49 + "c"])
    stops.lookups = 0
    StopScanner(stops).feed(("a" * 60 + "x") * 100)
    assert stops.lookups <= 2 * 61 * 100
