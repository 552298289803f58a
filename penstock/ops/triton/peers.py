"""Collectives of small tensors over peer memory: every rank reads the buffers of all others.

A program copies its piece of the tensor into this rank's buffer, tells the same program on the
other ranks, waits for theirs, and reads all pieces. Sums are computed in rank order, in float32, so
all ranks get the same bits. A collective is one kernel, and graphs can capture it.

Each program counts its own calls, on the device. The count is what it tells and waits for, so
nothing is reset, and it selects one of two halves of the buffer. A program that has heard from
another rank in call n + 1 knows that this rank has read call n. So call n + 2 may overwrite it.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric_memory

logger = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PIECE_BYTES = 4096  # that a program exchanges
MOST_BYTES = 8 << 20
SHARED_GPU_BYTES = 32 << 20  # of ranks that share a GPU, where NCCL does not run
NCCL_LATENCY_S = 8e-6  # more than that of the kernel here
LINK_BYTES_PER_S = 450e9
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


@triton.jit(do_not_specialize=["rank"])  # all ranks run the same code
def _exchange_kernel(
    x_ptr, out_ptr, buffers_ptr, counts_ptr, num_elements, half_elements, flags_at, num_pieces,
    rank, SIZE: tl.constexpr, PIECE: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """`out` gets the sum over ranks, or the tensors of all ranks one after the other."""
    piece = tl.program_id(0)
    offsets = piece * PIECE + tl.arange(0, PIECE)
    mask = offsets < num_elements
    count = tl.load(counts_ptr + piece) + 1
    at = (count & 1) * half_elements + offsets
    x = tl.load(x_ptr + offsets, mask=mask)
    pointer = tl.pointer_type(x_ptr.dtype.element_ty)
    own = tl.load(buffers_ptr + rank)
    tl.store(tl.multiple_of(own.to(pointer), 16) + at, x, mask=mask)
    tl.debug_barrier()  # all threads have stored
    for other in tl.static_range(SIZE):
        flags = tl.load(buffers_ptr + other).to(tl.pointer_type(tl.int32)) + flags_at
        tl.atomic_xchg(flags + rank * num_pieces + piece, count, sem="release", scope="sys")
    flags = own.to(tl.pointer_type(tl.int32)) + flags_at + piece
    for other in tl.static_range(SIZE):
        seen = tl.atomic_add(flags + other * num_pieces, 0, sem="acquire", scope="sys")
        while seen - count < 0:  # counts wrap
            seen = tl.atomic_add(flags + other * num_pieces, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    total = tl.zeros([PIECE], tl.float32)
    for other in tl.static_range(SIZE):
        theirs = tl.multiple_of(tl.load(buffers_ptr + other).to(pointer), 16)
        y = tl.load(theirs + at, mask=mask, volatile=True)
        if REDUCE:
            total += y.to(tl.float32)
        else:
            tl.store(out_ptr + other * num_elements + offsets, y, mask=mask)
    if REDUCE:
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(counts_ptr + piece, count)


def max_bytes_of(size: int) -> int:
    """The largest tensor that `size` ranks exchange this way. Larger ones use NCCL.

    A rank reads `size - 1` tensors. NCCL moves 2 * (size - 1) / size of one, but needs longer to
    begin. Both take equally long at this size, by NVLink's data sheet; it was not measured.
    """
    if size == 2:
        return MOST_BYTES
    extra = (size - 1) * (1 - 2 / size)
    equal = int(NCCL_LATENCY_S * LINK_BYTES_PER_S / extra)
    return min(equal // PIECE_BYTES * PIECE_BYTES, MOST_BYTES)


def open_peers(
    group: ProcessGroup, device: torch.device, max_bytes: int | None = None
) -> PeerMemory | None:
    """Buffers that all ranks of the group can read; None if their GPUs cannot."""
    rank, size = group.rank(), group.size()
    if not _is_one_machine(group):
        return None
    max_bytes = max_bytes or max_bytes_of(size)
    memory, buffer = None, None
    try:
        buffer = symmetric_memory.empty(
            PeerMemory.buffer_bytes(size, max_bytes), dtype=torch.uint8, device=device
        )
        buffer.zero_()  # no rank has told anything
        torch.cuda.synchronize(device)
        handle = symmetric_memory.rendezvous(buffer, group)
        addresses = [int(address) for address in handle.buffer_ptrs]
        memory = PeerMemory(rank, addresses, device, max_bytes)
        memory.keeps = (buffer, handle)
    except RuntimeError as error:
        logger.warning("Ranks use NCCL for small tensors, too: no peer memory (%s)", error)
    agreed = torch.tensor([memory is not None], dtype=torch.int32)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)  # also waits until all have zeros
    return memory if agreed.item() else None


def _is_one_machine(group: ProcessGroup) -> bool:
    number = uuid.UUID(BOOT_ID.read_text().strip()).int >> 65  # 63 bits
    own = torch.tensor([number])
    numbers = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(numbers, own, group=group)
    return all(torch.equal(other, own) for other in numbers)


class PeerMemory:
    """Buffers of equal size, all zeros at first, one per rank.

    `addresses` are those that this rank sees.
    """

    keeps: object = None  # what the buffers live by

    def __init__(
        self, rank: int, addresses: list[int], device: torch.device, max_bytes: int
    ) -> None:
        self.rank = rank
        self.size = len(addresses)
        self.max_bytes = max_bytes
        self._num_pieces = max_bytes // PIECE_BYTES
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._counts = torch.zeros(self._num_pieces, dtype=torch.int32, device=device)

    @staticmethod
    def buffer_bytes(size: int, max_bytes: int) -> int:
        """Two halves, then a flag of each rank for each piece."""
        return 2 * max_bytes + size * (max_bytes // PIECE_BYTES) * 4

    def fits(self, x: torch.Tensor) -> bool:
        return x.is_cuda and x.nbytes <= self.max_bytes and x.dtype in DTYPES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        assert x.is_floating_point()
        assert x.is_contiguous()
        return self._exchange(x, x, reduce=True)

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, in rank order: [*shape] -> [size, *shape]."""
        x = x.contiguous()
        return self._exchange(x, x.new_empty((self.size, *x.shape)), reduce=False)

    def _exchange(self, x: torch.Tensor, out: torch.Tensor, reduce: bool) -> torch.Tensor:
        size = x.element_size()
        if x.numel():
            _exchange_kernel[(triton.cdiv(x.nbytes, PIECE_BYTES),)](
                x, out, self._buffers, self._counts, x.numel(), self.max_bytes // size,
                2 * self.max_bytes // 4, self._num_pieces, self.rank,
                SIZE=self.size, PIECE=PIECE_BYTES // size, REDUCE=reduce, num_warps=4,
            )  # fmt: skip
        return out
