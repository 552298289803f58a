"""A step's batch and tables as a GPU has them, against the plain ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.layers.context import ForwardContext
from penstock.ops.attention import AttentionMetadata
from penstock.protocol.kv import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheLayout,
)
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import NewRequest, ScheduledRequest, StepPlan
from penstock.runner.forward import HostSteps, StepBatch
from penstock.runner.kv_memory import KVMemory
from penstock.runner.layout import lay_out
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


def memory(device: torch.device) -> KVMemory:
    return KVMemory(KVCacheLayout(groups=GROUPS, num_blocks=64, page_bytes=2048), device)


def attention_of(context: ForwardContext) -> list[AttentionMetadata]:
    return [context.attention[name] for name in ("a", "b")]


def tensors_of(batch: StepBatch) -> dict[str, torch.Tensor]:
    inputs, rows = batch.inputs, batch.sampling_rows
    return {
        "query_starts": inputs.context.query_starts,
        "token_slots": inputs.context.token_slots,
        "token_ids": inputs.token_ids,
        "positions": inputs.positions,
        "logits_rows": batch.logits_rows,
        "sample_slots": rows.slots,
        "sample_positions": rows.positions,
    }


def enter(tables: RequestTables, plan: StepPlan) -> None:
    for request in plan.new_requests:
        tables.add(request)
    tables.append_blocks(plan.scheduled)


@pytest.mark.parametrize("padding", [0, 5])
def test_batches_and_tables_are_the_plain_ones(device: torch.device, padding: int) -> None:
    plain = RequestTables(MAX_SEQS, MAX_LEN, GROUPS, torch.device("cpu"), NUM_DRAFTS)
    tables = DeviceTables(MAX_SEQS, MAX_LEN, GROUPS, device, NUM_DRAFTS)
    buffers = StepBuffers(tables, memory(device), 64, NUM_DRAFTS)
    host = HostSteps(None, plain, memory(torch.device("cpu")))  # type: ignore[arg-type]
    for plan in PLANS:
        enter(plain, plan)
        enter(tables, plan)
        expected = host.materialize(lay_out(plan, plain))
        layout = lay_out(plan, tables)
        batch = buffers.batch(layout)
        buffers.send(layout)
        rows, requests = layout.num_rows, len(layout.requests)
        buffers.fill(Bucket(rows + padding, min(requests + padding, MAX_SEQS), decode=False))

        for name, theirs in tensors_of(expected).items():
            assert tensors_of(batch)[name].tolist() == theirs.tolist(), name
        for ours, theirs in zip(
            attention_of(batch.inputs.context), attention_of(expected.inputs.context), strict=True
        ):
            assert ours.seq_lens.tolist() == theirs.seq_lens.tolist()
            assert ours.slot_mapping.tolist() == theirs.slot_mapping.tolist()
            assert ours.num_decodes == theirs.num_decodes
            assert ours.max_query_len == theirs.max_query_len
        for mapping in buffers.slot_mappings:  # padding: the null block
            assert not mapping[rows : rows + padding].any()
        assert buffers.token_slots[rows : rows + padding].tolist() == [-1] * padding
        assert np.array_equal(batch.sampling_rows.host_slots, expected.sampling_rows.host_slots)
        slots = torch.from_numpy(layout.slots[:1])
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
    slot = tables.add(new_request("p", 9, 0))
    tables.append_blocks([ScheduledRequest("p", 0, 9, True, [others])])
    row = tables.block_tables[0][slot].tolist()
    assert row[: len(others)] == others
    assert not any(row[len(others) :])
    assert len(row) * 4 >= MAX_LEN  # a token's slot is looked up in every group's table


def test_prompts_from_their_first_token_stand_before_chunks_with_tokens_before_them() -> None:
    tables = RequestTables(MAX_SEQS, MAX_LEN, GROUPS, torch.device("cpu"))
    first, second = PLANS
    enter(tables, first)
    layout = lay_out(StepPlan(step_id=1, scheduled=first.scheduled[::-1]), tables)
    assert [item.request_id for item in layout.requests] == ["r", "p", "q"]
    assert (layout.num_decodes, layout.num_prompts, layout.num_prompt_rows) == (0, 2, 14)
    layout = lay_out(second, tables)
    assert [item.request_id for item in layout.requests] == ["p", "q", "r"]
    assert (layout.num_decodes, layout.num_prompts, layout.num_prompt_rows) == (1, 0, 0)


def test_a_model_without_kv_groups_has_rows_and_positions(device: torch.device) -> None:
    tables = DeviceTables(MAX_SEQS, MAX_LEN, [], device)
    nothing = KVMemory(KVCacheLayout(groups=[], num_blocks=1, page_bytes=0), device)
    buffers = StepBuffers(tables, nothing, 64)
    for request in REQUESTS:
        tables.add(request)
    plan = StepPlan(
        step_id=1, scheduled=[ScheduledRequest(r.request_id, 0, 4, True) for r in REQUESTS]
    )
    tables.append_blocks(plan.scheduled)
    layout = lay_out(plan, tables)
    batch = buffers.batch(layout)
    buffers.send(layout)
    buffers.fill(Bucket(16, MAX_SEQS, decode=False))
    assert batch.inputs.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 8, 9, 10, 11]
    starts = ((REQUESTS[0], 0), (REQUESTS[2], 0), (REQUESTS[1], 8))
    expected = [token for request, at in starts for token in request.token_ids[at : at + 4]]
    assert batch.inputs.token_ids.tolist() == expected
    assert not batch.inputs.context.attention


def test_rows_behind_the_last_that_samples_belong_to_nobody(device: torch.device) -> None:
    tables = DeviceTables(MAX_SEQS, MAX_LEN, GROUPS, device)
    enter(tables, PLANS[0])
    buffers = StepBuffers(tables, memory(device), 64)
    layout = lay_out(PLANS[0], tables)
    buffers.send(layout)
    buffers.fill(Bucket(32, MAX_SEQS, decode=False))
    num_rows = len(layout.logits_rows)
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
    buffers = StepBuffers(tables, memory(device), 64)
    buffers.null_step()
    buffers.fill(Bucket(16, MAX_SEQS, decode=False))
    assert torch.equal(tables.num_computed, before)
    assert not buffers.seq_lens.any()
    assert not any(mapping.any() for mapping in buffers.slot_mappings)
