"""A step's batch and tables as a GPU has them, against the plain ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.protocol.kv import CrossAttentionSpec, FullAttentionSpec, KVCacheGroup
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import NewRequest, ScheduledRequest, StepPlan
from penstock.runner.batch import make_batch
from penstock.runner.tables import RequestTables

pytest.importorskip("triton", reason="needs Triton")

from penstock.runner.device_batch import Bucket, StepBuffers
from penstock.runner.device_tables import DeviceTables

SPEC = FullAttentionSpec(num_kv_heads=2, head_dim=16, dtype="float32")
GROUPS = [
    KVCacheGroup(spec=SPEC, block_size=4, layer_names=["a"]),
    KVCacheGroup(spec=SPEC, block_size=8, layer_names=["b"]),
]
MAX_SEQS, MAX_LEN, NUM_DRAFTS = 6, 64, 2


def new_request(name: str, length: int, num_computed: int) -> NewRequest:
    return NewRequest(
        request_id=name,
        token_ids=[(7 * index + length) % 90 for index in range(length)],
        num_prompt_tokens=length,
        num_computed_tokens=num_computed,
        params=SamplingParams(),
        seed=1,
    )


def blocks(length: int, first: int) -> list[list[int]]:
    return [[first + index for index in range(-(-length // group.block_size))] for group in GROUPS]


# Two steps: prompts, one in chunks; then decodes, the rest of the chunk and drafts to verify.
REQUESTS = [new_request("p", 9, 0), new_request("q", 30, 8), new_request("r", 5, 0)]
PLANS = [
    StepPlan(
        step_id=1,
        new_requests=REQUESTS,
        scheduled=[
            ScheduledRequest("p", 0, 9, True, blocks(12, 1)),
            ScheduledRequest("r", 0, 5, True, blocks(8, 30)),
            ScheduledRequest("q", 0, 10, False, blocks(30, 10)),
        ],
    ),
    StepPlan(
        step_id=2,
        scheduled=[
            ScheduledRequest("q", 0, 12, True),
            ScheduledRequest("p", 0, 1, True),
            ScheduledRequest("r", 0, 3, True, [[40], []], 2),
        ],
    ),
]


def enter(tables: RequestTables, plan: StepPlan) -> None:
    for request in plan.new_requests:
        tables.add(request)
    tables.append_blocks(plan.scheduled)


@pytest.mark.parametrize("padding", [0, 5])
def test_batches_and_tables_are_the_plain_ones(device: torch.device, padding: int) -> None:
    plain = RequestTables(MAX_SEQS, MAX_LEN, GROUPS, torch.device("cpu"), NUM_DRAFTS)
    tables = DeviceTables(MAX_SEQS, MAX_LEN, GROUPS, device, NUM_DRAFTS)
    buffers = StepBuffers(tables, 64, NUM_DRAFTS)
    for plan in PLANS:
        enter(plain, plan)
        enter(tables, plan)
        expected = make_batch(plan, plain)
        batch = buffers.lay_out(plan)
        buffers.send(batch)
        rows, requests = len(batch.token_ids), len(batch.requests)
        buffers.fill(Bucket(rows + padding, min(requests + padding, MAX_SEQS), decode=False))
        buffers.fill_sample_rows()

        assert batch.requests == expected.requests
        for name in ("host_slots", "host_starts", "sampling", "rows_per_sample"):
            assert np.array_equal(getattr(batch, name), getattr(expected, name)), name
        for name in ("query_starts", "token_slots", "token_ids", "positions", "logits_rows"):
            ours, theirs = getattr(batch, name), getattr(expected, name)
            assert ours.tolist() == theirs.tolist(), name
        for ours, theirs in zip(batch.attention, expected.attention, strict=True):
            assert ours.seq_lens.tolist() == theirs.seq_lens.tolist()
            assert ours.slot_mapping.tolist() == theirs.slot_mapping.tolist()
            assert ours.num_decodes == theirs.num_decodes
            assert ours.max_query_len == theirs.max_query_len
        for mapping in buffers.slot_mappings:  # padding: the null block
            assert not mapping[rows : rows + padding].any()
        for name in ("slots", "positions"):
            ours, theirs = (getattr(b.sampling_rows, name) for b in (batch, expected))
            assert ours.tolist() == theirs.tolist(), name
        assert np.array_equal(batch.sampling_rows.host_slots, expected.sampling_rows.host_slots)
        slots = expected.slots[:1]
        for each in (plain, tables):
            each.append_tokens(slots.to(each.device), torch.tensor([77], device=each.device))
        for name in ("token_ids", "num_tokens", "num_prompt_tokens", "num_computed"):
            assert torch.equal(getattr(tables, name).cpu(), getattr(plain, name)), name
        for ours, theirs in zip(tables.block_tables, plain.block_tables, strict=True):
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("kind", [RequestTables, DeviceTables])
@pytest.mark.parametrize("max_tokens", [8, 200])  # of the other sequence: less and more than ours
def test_tables_have_room_for_all_blocks_of_another_sequence(
    device: torch.device, kind: type[RequestTables], max_tokens: int
) -> None:
    spec = CrossAttentionSpec(num_kv_heads=2, head_dim=16, dtype="float32", max_tokens=max_tokens)
    group = KVCacheGroup(spec=spec, block_size=4, layer_names=["c"])
    where = device if kind is DeviceTables else torch.device("cpu")
    tables = kind(MAX_SEQS, MAX_LEN, [group], where)
    others = [*range(1, 1 + max_tokens // 4)]
    tables.add(new_request("p", 9, 0))
    tables.append_blocks([ScheduledRequest("p", 0, 9, True, [others])])
    row = tables.block_tables[0][tables.slot_of("p")].tolist()
    assert row[: len(others)] == others
    assert not any(row[len(others) :])
    assert len(row) * 4 >= MAX_LEN  # a token's slot is looked up in every group's table


def test_prompts_from_their_first_token_stand_before_chunks_with_tokens_before_them(
    device: torch.device,
) -> None:
    tables = DeviceTables(MAX_SEQS, MAX_LEN, GROUPS, device)
    first, second = PLANS
    enter(tables, first)
    plan = StepPlan(step_id=1, scheduled=first.scheduled[::-1])
    buffers = StepBuffers(tables, 64, NUM_DRAFTS)
    batch = buffers.lay_out(plan)
    assert [item.request_id for item in batch.requests] == ["r", "p", "q"]
    assert {(m.num_prompts, m.num_prompt_rows) for m in batch.attention} == {(2, 14)}
    batch = buffers.lay_out(second)
    assert [item.request_id for item in batch.requests] == ["p", "q", "r"]
    assert {(m.num_prompts, m.num_prompt_rows) for m in batch.attention} == {(0, 0)}


def test_rows_behind_the_last_that_samples_belong_to_nobody(device: torch.device) -> None:
    tables = DeviceTables(MAX_SEQS, MAX_LEN, GROUPS, device)
    enter(tables, PLANS[0])
    buffers = StepBuffers(tables, 64)
    batch = buffers.lay_out(PLANS[0])
    buffers.send(batch)
    buffers.fill(Bucket(32, MAX_SEQS, decode=False))
    buffers.fill_sample_rows()
    num_rows = len(batch.logits_rows)
    assert (buffers.sample_slots[:num_rows] >= 0).all()
    assert (buffers.sample_slots[num_rows:] == -1).all()
    before = tables.token_ids.clone(), tables.num_tokens.clone()
    tables.append_tokens(
        buffers.sample_slots[num_rows:], torch.full((MAX_SEQS - num_rows,), 9, device=device)
    )
    assert torch.equal(tables.token_ids, before[0])
    assert torch.equal(tables.num_tokens, before[1])


def test_a_step_of_padding_alone_changes_no_table(device: torch.device) -> None:
    tables = DeviceTables(MAX_SEQS, MAX_LEN, GROUPS, device)
    enter(tables, PLANS[0])
    before = tables.num_computed.clone()
    buffers = StepBuffers(tables, 64)
    buffers.null_step()
    buffers.fill(Bucket(16, MAX_SEQS, decode=False))
    assert torch.equal(tables.num_computed, before)
    assert not buffers.seq_lens.any()
    assert not any(mapping.any() for mapping in buffers.slot_mappings)
