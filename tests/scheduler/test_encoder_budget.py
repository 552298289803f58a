"""The encoder budget: an item that a step reads is there, what is kept fits, and all finish."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.adapter import Adapter
from penstock.protocol.errors import InputError
from penstock.protocol.limits import StepLimits
from penstock.protocol.media import DropMedia, EncodeMedia, MediaItem
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams
from penstock.scheduler.encoder_budget import EncoderBudget
from penstock.scheduler.limits import find_spans
from penstock.scheduler.request import RequestState

MOST_ROWS = 12


def limits(rows: int, tokens: int, has_spans: bool = False) -> StepLimits:
    return StepLimits(
        max_num_seqs=8,
        max_num_batched_tokens=tokens,
        max_model_len=4096,
        encoder_rows=rows,
        spans="media" if has_spans else "none",
        max_span=MOST_ROWS if has_spans else 0,
    )


def request(name: str, sizes: list[tuple[int, int, int]]) -> EngineRequest:
    """`sizes`: for each item, text before it, its rows, and which content it is."""
    media, at = [], 0
    for gap, rows, content in sizes:
        at += gap
        media.append(
            MediaItem(
                modality="image",
                hash=bytes([content, rows]),
                offset=at,
                length=rows,
                runs=[(0, rows)],
                path="",
                tensors=[],
            )
        )
        at += rows
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[0] * (at + 1),
        params=SamplingParams(max_tokens=1),
        seed=0,
        media=media,
    )


@dataclass
class Workers:
    """Keeps what the jobs say."""

    capacity: int
    kept: dict[bytes, int] = field(default_factory=dict)
    num_encoded: int = 0

    def run(self, budget: EncoderBudget) -> None:
        jobs = budget.take_jobs()
        for job in jobs:
            if isinstance(job, DropMedia):
                del self.kept[job.hash]
            else:
                assert isinstance(job, EncodeMedia)
                assert job.item.hash not in self.kept
                self.kept[job.item.hash] = job.item.num_rows
                self.num_encoded += 1
        assert sum(self.kept.values()) <= self.capacity


items = st.tuples(st.integers(0, 5), st.integers(1, MOST_ROWS), st.integers(0, 3))


@given(
    prompts=st.lists(st.lists(items, max_size=5), min_size=1, max_size=6),
    capacity=st.integers(MOST_ROWS, 3 * MOST_ROWS),
    tokens=st.integers(1, 40),
    events=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.booleans()), max_size=6),
    has_spans=st.booleans(),
)
def test_items_are_there_and_requests_finish(
    prompts: list[list[tuple[int, int, int]]],
    capacity: int,
    tokens: int,
    events: list[tuple[int, int, bool]],
    has_spans: bool,
) -> None:
    """`events`: in which step which request is preempted, or ends if True."""
    if has_spans:
        tokens = max(tokens, MOST_ROWS)  # or the engine does not start
    bounds = limits(capacity, tokens, has_spans)
    budget, workers = EncoderBudget(bounds), Workers(capacity)
    asked = [request(str(i), sizes) for i, sizes in enumerate(prompts)]
    running = [
        RequestState(each, i, 4096, find_spans(each, bounds)) for i, each in enumerate(asked)
    ]
    for state in running:
        budget.check(state.request)
    num_left = sum(len(state.token_ids) for state in running)
    for step in range(3 * num_left + 200):
        for at, index, ends in events:
            if at == step and index < len(running):
                budget.release(running[index])
                running[index].preempt()
                if ends:
                    del running[index]
        if not running:
            break
        budget.begin_step()
        left, read = tokens, []
        for state in running:
            first = state.num_computed_tokens
            num = min(len(state.token_ids) - first, left)
            num = budget.limit(state, first, num)
            if num:
                budget.take(state, num)
                state.num_computed_tokens += num
                left -= num
                end = state.num_computed_tokens
                assert not any(start < end < stop for start, stop in state.spans)
                read += [
                    item
                    for item in state.request.media
                    if item.offset < first + num and item.end > first
                ]
        workers.run(budget)
        for item in read:
            assert item.hash in workers.kept
        done = [s for s in running if s.num_computed_tokens == len(s.token_ids)]
        for state in done:
            budget.release(state)
            running.remove(state)
    assert not running, "requests wait for each other"


def test_one_content_is_encoded_once_while_it_fits() -> None:
    budget, workers = EncoderBudget(limits(10, 100)), Workers(10)
    for number in range(100):
        state = RequestState(request(str(number), [(2, 10, 1)]), number, 4096)
        budget.begin_step()
        assert budget.limit(state, 0, len(state.token_ids)) == len(state.token_ids)
        budget.take(state, len(state.token_ids))
        workers.run(budget)
    assert workers.num_encoded == 1
    other = RequestState(request("other", [(0, 10, 2)]), 200, 4096)
    budget.begin_step()
    budget.take(other, 5)
    workers.run(budget)
    assert workers.kept == {bytes([2, 10]): 10}
    budget.release(other)
    for number in range(3):  # right after it was evicted: once again
        state = RequestState(request(f"again {number}", [(2, 10, 1)]), 300 + number, 4096)
        budget.begin_step()
        budget.take(state, len(state.token_ids))
        workers.run(budget)
    assert workers.num_encoded == 3


def test_what_never_fits_is_refused() -> None:
    budget = EncoderBudget(limits(10, 100))
    with pytest.raises(InputError, match="encoder_cache_tokens"):
        budget.check(request("large", [(0, 11, 1)]))


def test_a_span_longer_than_the_model_says_is_refused() -> None:
    with pytest.raises(InputError, match="13 tokens in a row, but at most 12"):
        find_spans(request("long", [(0, MOST_ROWS + 1, 1)]), limits(100, 100, has_spans=True))


def test_an_item_is_encoded_apart_for_an_adapter_that_changes_the_tower() -> None:
    """Requests with the same adapter share it, as those without one do."""
    budget = EncoderBudget(limits(40, 40))
    states = [RequestState(request(str(i), [(1, 4, 0)]), i, 4096) for i in range(5)]
    for state, name in zip(states, ["", "a", "b", "a", ""], strict=True):
        if name:
            state.adapter = Adapter(name, f"digest-{name}", "")
            state.tower_slot = ord(name)
            state.key_media_by_adapter()
            state.key_media_by_adapter()  # as after a preemption
    budget.begin_step()
    for state in states:
        assert budget.limit(state, 0, 6) == 6
        budget.take(state, 6)
    jobs = [job for job in budget.take_jobs() if isinstance(job, EncodeMedia)]
    assert [job.adapter_slot for job in jobs] == [None, ord("a"), ord("b")]
    assert [job.item.hash for job in jobs] == [state.media[0].hash for state in states[:3]]
    assert len({job.item.hash for job in jobs}) == 3
