"""Recurrent layers give the same, however tokens come: alone, in batches, in chunks of any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_steps import MAX_WRONG, Conv, Delta, Layer, Mamba, Steps

from penstock.ops import reference
from penstock.ops.recurrent import MAX_CHUNK, chunk_size

LAYERS: list[type[Layer]] = [Conv, Mamba, Delta]


def draw_steps(
    kind: type[Layer], data: st.DataObject, block_sizes: list[int], longest: int
) -> tuple[Steps, list[int]]:
    """Steps of up to four requests, and the requests' lengths."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    block_size = data.draw(st.sampled_from(block_sizes))
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=4))
    return Steps(kind(), lengths, block_size, reference), lengths


def run_beside_readers(steps: Steps, counts: dict[int, int], wrong: dict[int, int]) -> None:
    """Run a step, if it has tokens. Full blocks may be read by others and must not change."""
    if counts:
        shared = steps.full_blocks()
        before = steps.states[shared]
        steps.run(counts, wrong=wrong)
        assert torch.equal(steps.states[shared], before), "a block that others read was written"


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=15)
@given(data=st.data())
def test_any_schedule_gives_the_recurrence(kind: type[Layer], data: st.DataObject) -> None:
    steps, lengths = draw_steps(kind, data, [1, 2, 7, 16, 64], longest=60)
    while steps.computed != lengths:
        left = [length - done for length, done in zip(lengths, steps.computed, strict=True)]
        counts = {}
        for index, missing in enumerate(left):
            asked = data.draw(st.sampled_from([60, 17, 5, 2, 1, 1, 0]))
            if min(asked, missing):
                counts[index] = min(asked, missing)
        run_beside_readers(steps, counts, {})
    steps.check()


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=25)
@given(data=st.data())
def test_rejected_drafts_leave_nothing_behind(kind: type[Layer], data: st.DataObject) -> None:
    steps, lengths = draw_steps(kind, data, [1, 2, 3, 7, 16], longest=30)
    while steps.computed != lengths:
        counts, wrong = {}, {}
        for index, (length, done) in enumerate(zip(lengths, steps.computed, strict=True)):
            asked = min(data.draw(st.sampled_from([9, 4, 2, 1, 1, 0])), length - done)
            if asked:
                counts[index] = asked
                if done and data.draw(st.booleans()):
                    wrong[index] = data.draw(st.integers(0, MAX_WRONG))
        run_beside_readers(steps, counts, wrong)
        steps.check()


@pytest.mark.parametrize("kind", LAYERS)
def test_drafts_give_the_bits_of_single_tokens(kind: type[Layer]) -> None:
    states, outputs = [], []
    for drafts in (False, True):
        torch.manual_seed(5)
        steps = Steps(kind(), [22], 4, reference)
        steps.run({0: 6})
        for _ in range(4):
            if drafts:
                steps.run({0: 4}, wrong={0: 2})
            else:
                for _ in range(4):
                    steps.run({0: 1})
        blocks = steps.table[0, :6].long()
        states.append(steps.states[blocks])
        outputs.append(steps.outputs[0])
    assert torch.equal(*states)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_long_prompt_beside_others(kind: type[Layer]) -> None:
    torch.manual_seed(1)
    steps = Steps(kind(), [300, 5, 130, 2], 128, reference)
    steps.run({0: 300, 1: 5, 2: 129, 3: 1})
    steps.run({2: 1, 3: 1})
    steps.check()


@pytest.mark.parametrize("kind", LAYERS)
def test_a_request_goes_on_from_a_state_that_another_left_and_does_not_touch_it(
    kind: type[Layer],
) -> None:
    torch.manual_seed(3)
    layer = kind()
    steps = Steps(layer, [37, 50], 8, reference)
    for ours, theirs in zip(steps.inputs[1], steps.inputs[0], strict=True):
        ours[:32] = theirs[:32]
    steps.run({0: 37})
    steps.table[1, :4] = torch.tensor([0, 0, 0, steps.table[0, 3]])  # gaps, then the shared one
    steps.computed[1] = 32
    own = steps.table[0, :5].long()
    before = steps.states[own]
    for count in (1, 4, 13):
        steps.run({1: count})
    assert torch.equal(steps.states[own], before)
    expected, _ = layer.naive(steps.inputs[1])
    torch.testing.assert_close(steps.outputs[1][32:].double(), expected[32:], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_padding_writes_no_block_of_anybody(kind: type[Layer]) -> None:
    torch.manual_seed(4)
    steps = Steps(kind(), [20, 3], 4, reference)
    steps.run({0: 20})
    own = steps.table[0, :5].long()
    before = steps.states[own]
    steps.run({1: 1}, num_padding=3)
    assert torch.equal(steps.states[own], before)
    steps.check()


@pytest.mark.parametrize("block_size", [1, 16, 48, 100, 128, 67])
def test_blocks_are_whole_chunks(block_size: int) -> None:
    size = chunk_size(block_size)
    assert block_size % size == 0
    assert size <= MAX_CHUNK
