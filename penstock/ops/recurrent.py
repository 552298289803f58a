"""Recurrent states behind a block table, and the convolution before them: the torch reference.

Block i of a request's table holds the state after token (i + 1) * block_size - 1. The last block
holds the running state. A step that computes tokens [a, b) reads the state in block (a - 1) //
block_size; at a = 0 it starts from zeros, whatever the memory holds. It writes the state after b -
1 and the states at the block boundaries before it. Blocks that were full before the step, which
other requests may share, are never written.

A state cannot go back. So of a token and the drafts after it, the step stores only the state after
the token. Once the drafts are verified, those that hold are computed again, from the same inputs,
and their states are stored (`StateDrafts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.ops.attention import AttentionMetadata, HostLens

MAX_CHUNK = 64  # tokens computed as one matmul
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StateStep:
    """Where the states of one step are, for all layers of a KV group."""

    num_decodes: int  # leading requests (and rows) with one token each
    seq_lens: torch.Tensor  # [num_decodes] int32: tokens after this step; 0 for padding
    block_table: torch.Tensor  # [num_decodes, max_blocks] int32
    block_size: int
    chunks: StateChunks | None  # of the longer queries after the decodes
    drafts: StateDrafts | None = None  # of the queries after those, which have drafts

    @cached_property
    def is_fresh(self) -> torch.Tensor:
        """[num_decodes] bool: whether the request has no earlier token."""
        return self.seq_lens <= 1

    @cached_property
    def read_blocks(self) -> torch.Tensor:
        """[num_decodes] int64: blocks of the states before the token; any block for a first one."""
        return self._blocks((self.seq_lens - 2).clamp(min=0))

    @cached_property
    def write_blocks(self) -> torch.Tensor:
        """[num_decodes] int64; the null block for padding, whose table row is stale."""
        blocks = self._blocks((self.seq_lens - 1).clamp(min=0))
        return blocks.masked_fill(self.seq_lens <= 0, 0)

    def _blocks(self, positions: torch.Tensor) -> torch.Tensor:
        columns = (positions // self.block_size).long()[:, None]
        return self.block_table.gather(1, columns)[:, 0].long()


@dataclass(frozen=True)
class StateChunks:
    """Queries of more than one token, split where positions are multiples of the chunk size.

    Block boundaries are such positions. Requests with more chunks come first. Chunks are ordered by
    their number inside the request, then by request. Therefore chunks that can be computed at the
    same time are adjacent, and continue the states of a prefix of the requests.
    """

    step_rows: slice  # rows of these queries in the step, after the decodes
    size: int
    rows: torch.Tensor  # [num_chunks, size] int64, into `step_rows`; one past the last is padding
    is_token: torch.Tensor  # [num_chunks, size] bool: False for padding
    positions: torch.Tensor  # [num_rows] int64: index of each row in `rows`, flattened
    rounds: list[Round]
    read_blocks: torch.Tensor  # [num_requests] int64
    is_fresh: torch.Tensor  # [num_requests] bool
    row_requests: torch.Tensor  # [num_rows] int64: index of each row's request
    row_offsets: torch.Tensor  # [num_rows] int64: offset of each row in its query
    store_rows: torch.Tensor  # [num_stores] int64: rows after which a state is stored
    store_blocks: torch.Tensor  # [num_stores] int64: the blocks to store it in

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [num_rows, ...] in chunks [num_chunks, size, ...], zeros for padding."""
        padding = x.new_zeros((1, *x.shape[1:]))
        return torch.cat([x, padding])[self.rows]

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """Chunks [num_chunks, size, ...] back in rows."""
        return x.flatten(0, 1)[self.positions]

    def initial(self, states: torch.Tensor) -> torch.Tensor:
        """The states before the step, [num_requests, ...]."""
        return fresh_or(states[self.read_blocks], self.is_fresh)


@dataclass(frozen=True)
class StateDrafts:
    """Queries of one token and the drafts after it, computed token by token, as decodes are."""

    step_rows: slice  # rows of these queries in the step, the last ones
    query_starts: torch.Tensor  # [num_requests + 1] int32: rows in the step
    seq_lens: torch.Tensor  # [num_requests] int32: tokens after this step, drafts included
    block_table: torch.Tensor  # [num_requests, max_blocks] int32
    block_size: int
    # [num_requests] int32: the drafts to replay. None: all rows are computed, and the state after
    # the first one is stored.
    num_accepted: torch.Tensor | None = None

    def replay(self, num_accepted: torch.Tensor) -> StateStep:
        """A step over the same rows, without the others, that stores what drafts leave."""
        rows = slice(0, self.step_rows.stop - self.step_rows.start)
        drafts = replace(self, step_rows=rows, num_accepted=num_accepted)
        return StateStep(0, self.seq_lens[:0], self.block_table[:0], self.block_size, None, drafts)

    def initial(self, states: torch.Tensor) -> torch.Tensor:
        """The states before the first tokens, [num_requests, ...], in the order of the rounds."""
        read_blocks, is_fresh, _ = self._on_host
        return fresh_or(states[read_blocks], is_fresh)

    def compute(
        self,
        states: torch.Tensor,
        output: torch.Tensor,
        update: Callable[[IntArray, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Fill `output`, token by token, and store the states.

        `update` gives the outputs of some rows and the states after them, from those before.
        """
        state = self.initial(states)
        for part in self._on_host[2]:
            output[part.rows], state = update(part.rows, state[: len(part.rows)])
            part.store(states, state)
        return output

    @cached_property
    def _on_host(self) -> tuple[torch.Tensor, torch.Tensor, list[TokenRound]]:
        """For the reference: blocks to read, requests that start from zeros, and the rounds."""
        starts = self.query_starts.numpy(force=True).astype(np.int64)
        rows, counts = starts[:-1] - starts[0], np.diff(starts)
        begins = self.seq_lens.numpy(force=True) - counts  # position of each query's first token
        replays = self.num_accepted is not None
        if self.num_accepted is not None:
            rows, begins, counts = rows + 1, begins + 1, self.num_accepted.numpy(force=True)
        order = np.argsort(-counts, kind="stable")
        rows, begins, counts = rows[order], begins[order], counts[order]
        table = self.block_table.numpy(force=True)[order]
        rounds = []
        for index in range(int(counts.max(initial=0))):
            num = int((counts > index).sum())
            ends = begins[:num] + index + 1
            is_kept = (counts[:num] == index + 1) | (ends % self.block_size == 0)
            places = np.flatnonzero(is_kept if replays else np.full(num, index == 0))
            blocks = table[places, (ends[places] - 1) // self.block_size].astype(np.int64)
            rounds.append(TokenRound(rows[:num] + index, places, blocks))
        read = table[np.arange(len(order)), np.maximum(begins - 1, 0) // self.block_size]
        return torch.from_numpy(read.astype(np.int64)), torch.from_numpy(begins == 0), rounds


@dataclass(frozen=True)
class TokenRound:
    """Tokens computed at the same time: one of each of the first requests."""

    rows: IntArray  # into `StateDrafts.step_rows`
    store_places: IntArray  # requests whose new state is stored
    store_blocks: IntArray

    def store(self, states: torch.Tensor, new: torch.Tensor) -> None:
        """Write the new states [len(rows), ...] to their blocks."""
        if len(self.store_places):
            states[self.store_blocks] = new[self.store_places].to(states.dtype)


@dataclass(frozen=True)
class Round:
    """Chunks computed at the same time: one for each of the first `count` requests."""

    start: int  # first chunk
    count: int
    store_places: torch.Tensor | None  # [n] int64: requests whose new state is stored
    store_blocks: torch.Tensor  # [n] int64: the blocks to store it in

    @property
    def chunks(self) -> slice:
        return slice(self.start, self.start + self.count)

    def store(self, states: torch.Tensor, new: torch.Tensor) -> None:
        """Write the new states [count, ...] to their blocks."""
        if self.store_places is not None:
            states[self.store_blocks] = new[self.store_places].to(states.dtype)


def fresh_or(state: torch.Tensor, is_fresh: torch.Tensor) -> torch.Tensor:
    """A copy of [n, ...] with zeros where a request has no earlier token."""
    shape = (len(is_fresh), *[1] * (state.dim() - 1))
    return state.masked_fill(is_fresh.view(shape), 0.0)


# -- a step's layout


def state_step(metadata: AttentionMetadata, block_size: int) -> StateStep:
    """The layout that all layers of a step share.

    The host must know the lengths of queries with several tokens.
    """
    assert not metadata.any_order, "steps of unknown order are not captured for recurrent layers"
    num, num_decodes, num_drafting = (
        len(metadata.seq_lens), metadata.num_decodes, metadata.num_drafting
    )  # fmt: skip
    if metadata.decode_rows > 1:  # a padded step: any of its requests may have drafts
        num_decodes, num_drafting = 0, num
    first = num - num_drafting  # request with drafts
    return StateStep(
        num_decodes,
        metadata.seq_lens[:num_decodes],
        metadata.block_table[:num_decodes],
        block_size,
        _cut(metadata, block_size, slice(num_decodes, first)) if num_decodes < first else None,
        _drafts(metadata, block_size, first) if num_drafting else None,
    )


def _drafts(metadata: AttentionMetadata, block_size: int, first: int) -> StateDrafts:
    known, start = metadata.host_lens, 0
    if first:
        start = int(metadata.query_starts[first] if known is None else known.query_starts[first])
    return StateDrafts(
        step_rows=slice(start, len(metadata.slot_mapping)),
        query_starts=metadata.query_starts[first:],
        seq_lens=metadata.seq_lens[first:],
        block_table=metadata.block_table[first:],
        block_size=block_size,
    )


def chunk_size(block_size: int) -> int:
    """The largest divisor of the block size that is at most `MAX_CHUNK`."""
    return next(size for size in range(min(block_size, MAX_CHUNK), 0, -1) if block_size % size == 0)


@dataclass(frozen=True)
class _Cuts:
    """All chunks of some queries, in the order of their rounds. [num_chunks] each."""

    place: IntArray  # index of the request
    round: IntArray
    row: IntArray  # first row
    length: IntArray
    end: IntArray  # position after the last token


def _cut(metadata: AttentionMetadata, block_size: int, requests: slice) -> StateChunks:
    decodes, size = requests.start, chunk_size(block_size)
    known = metadata.host_lens or HostLens(
        metadata.query_starts.long().numpy(force=True), metadata.seq_lens.long().numpy(force=True)
    )
    starts = known.query_starts[decodes : requests.stop + 1]
    ends = known.seq_lens[requests]
    first_row, starts = int(starts[0]), starts - starts[0]
    begins = ends - np.diff(starts)  # position of each query's first token
    num_chunks = (ends - 1) // size - begins // size + 1
    order = np.argsort(-num_chunks, kind="stable")  # request indexes
    cuts = _cut_queries(order, starts[:-1], begins, ends, num_chunks, size)

    num_rows = int(starts[-1])
    offsets = np.arange(size)
    rows = cuts.row[:, None] + offsets
    is_token = offsets < cuts.length[:, None]
    rows[~is_token] = num_rows
    positions = np.empty(num_rows, dtype=np.int64)
    positions[rows[is_token]] = np.flatnonzero(is_token)
    row_requests = np.empty(num_rows, dtype=np.int64)
    row_requests[rows[is_token]] = np.repeat(cuts.place, cuts.length)

    is_last = cuts.round == num_chunks[order][cuts.place] - 1
    stores = np.flatnonzero(is_last | (cuts.end % block_size == 0))
    device = metadata.block_table.device

    def put(array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    blocks = metadata.block_table[put(order + decodes)].long()
    columns = put((cuts.end[stores] - 1) // block_size)
    store_blocks = blocks[put(cuts.place[stores]), columns]
    read_columns = put(np.maximum(begins[order] - 1, 0) // block_size)
    return StateChunks(
        step_rows=slice(first_row, first_row + num_rows),
        size=size,
        rows=put(rows),
        is_token=torch.from_numpy(is_token).to(device, non_blocking=True),
        positions=put(positions),
        rounds=_rounds(cuts, stores, put(cuts.place[stores]), store_blocks),
        read_blocks=blocks.gather(1, read_columns[:, None])[:, 0],
        is_fresh=put(begins[order]) == 0,
        row_requests=put(row_requests),
        row_offsets=put(np.arange(num_rows) - np.repeat(starts[:-1], np.diff(starts))),
        store_rows=put(cuts.row[stores] + cuts.length[stores] - 1),
        store_blocks=store_blocks,
    )


def _cut_queries(
    order: IntArray,
    rows: IntArray,  # first row of each query
    begins: IntArray,
    ends: IntArray,
    num_chunks: IntArray,
    size: int,
) -> _Cuts:
    counts = num_chunks[order]
    place = np.repeat(np.arange(len(order)), counts)
    number = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin, end, row = begins[order][place], ends[order][place], rows[order][place]
    first = np.maximum(begin, (begin // size + number) * size)
    last = np.minimum(end, (begin // size + number + 1) * size)
    by_round = np.lexsort((place, number))
    fields = (place, number, row + first - begin, last - first, last)
    return _Cuts(*(field[by_round] for field in fields))


def _rounds(
    cuts: _Cuts, stores: IntArray, store_places: torch.Tensor, store_blocks: torch.Tensor
) -> list[Round]:
    num_rounds = int(cuts.round[-1]) + 1
    starts = np.searchsorted(cuts.round, np.arange(num_rounds + 1)).tolist()
    bounds = np.searchsorted(stores, starts).tolist()
    rounds = []
    for index in range(num_rounds):
        own = slice(bounds[index], bounds[index + 1])
        is_stored = bounds[index] < bounds[index + 1]
        rounds.append(
            Round(
                start=starts[index],
                count=starts[index + 1] - starts[index],
                store_places=store_places[own] if is_stored else None,
                store_blocks=store_blocks[own],
            )
        )
    return rounds


# -- the convolution


def causal_conv(
    x: torch.Tensor,  # [num_tokens, channels]
    weight: torch.Tensor,  # [channels, width]
    bias: torch.Tensor | None,  # [channels]
    states: torch.Tensor,  # [num_blocks, width - 1, channels]: the last tokens, oldest first
    step: StateStep,
) -> torch.Tensor:
    """silu of each channel's weighted sum over its last `width` tokens: [num_tokens, channels]."""
    output = torch.empty_like(x)
    decodes = step.num_decodes
    if decodes:
        before = fresh_or(states[step.read_blocks], step.is_fresh)
        window = torch.cat([before, x[:decodes, None].to(states.dtype)], dim=1)
        states[step.write_blocks] = window[:, 1:]
        output[:decodes] = _weigh(window.unbind(1), weight, bias)
    if step.chunks is not None:
        rows = step.chunks.step_rows
        output[rows] = conv_chunks(x[rows], weight, bias, states, step.chunks)
    if step.drafts is not None:
        rows = step.drafts.step_rows
        output[rows] = _conv_drafts(x[rows], weight, bias, states, step.drafts)
    return output


def _conv_drafts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    drafts: StateDrafts,
) -> torch.Tensor:
    def update(rows: IntArray, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat([state, x[rows, None].to(states.dtype)], dim=1)
        return _weigh(window.unbind(1), weight, bias).to(x.dtype), window[:, 1:]

    return drafts.compute(states, torch.zeros_like(x), update)


def conv_chunks(
    x: torch.Tensor,  # [num_rows, channels]
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    chunks: StateChunks,
) -> torch.Tensor:
    """`causal_conv` for a step's longer queries."""
    reach = weight.shape[1] - 1
    before = chunks.initial(states).flatten(0, 1)  # [num_requests * reach, channels]
    everything = torch.cat([before, x.to(states.dtype)])
    offsets = chunks.row_offsets
    rows = torch.arange(len(before), len(everything), device=x.device)
    own_before = chunks.row_requests * reach + reach + offsets
    sources = [  # where the token `shift` positions earlier is, oldest first
        torch.where(offsets >= shift, rows, own_before) - shift for shift in range(reach, -1, -1)
    ]
    for index, source in enumerate(sources[1:]):
        states[chunks.store_blocks, index] = everything[source[chunks.store_rows]]
    return _weigh([everything[source] for source in sources], weight, bias).to(x.dtype)


def _weigh(
    tokens: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """silu(bias + the weighted sum of tokens [n, channels], oldest first), in float32."""
    total = tokens[0].float() * weight[:, 0].float()
    for index, token in enumerate(tokens[1:], start=1):
        total = total + token.float() * weight[:, index].float()
    return F.silu(total if bias is None else total + bias.float())
