"""BlockPool: who holds each block, which block is reused next, and what a block contains.

A block is in one of three places: held (its count is above zero), draining (nobody holds it, but
a step in flight may still touch it), or on the free list. A free or draining block keeps its key
in the prefix map until it is handed out again. Every operation is O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable

NULL_BLOCK_ID = 0  # padding and gaps; never handed out, never freed

BlockKey = tuple[bytes, int]  # hash of all tokens up to the block's end, group index


class Block:
    """One page of the pool."""

    __slots__ = ("busy_until", "id", "key", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None  # its key in the prefix map
        self.busy_until = 0  # the last step that may touch it on behalf of a former holder


class BlockPool:
    """All blocks of the cache. `num_blocks` counts the null block."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"the null block alone makes 1, got {num_blocks}"
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.num_draining = 0
        self._free = OrderedDict.fromkeys(self.blocks[1:])  # the front is reused first
        self._by_hash: defaultdict[int, dict[bytes, Block]] = defaultdict(dict)  # by group
        self._draining: defaultdict[int, list[Block]] = defaultdict(list)  # by last busy step
        self._collected_step = 0

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_free_of(self, blocks: Iterable[Block]) -> int:
        """By how many blocks less there would be to hand out if these were touched."""
        return sum(map(self._free.__contains__, blocks))

    def take(self, num_blocks: int) -> list[Block]:
        """Hand out the least recently used free blocks; the caller has checked `num_free`."""
        taken = []
        for _ in range(num_blocks):
            block, _ = self._free.popitem(last=False)
            if block.key is not None:
                self._forget(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, *blocks: Block) -> None:
        """Add a holder to blocks whose content is to be shared."""
        free, null_block = self._free, self.null_block
        for block in blocks:
            assert block is not null_block, "the null block has no holders"
            if block.ref_count == 0:
                if block in free:
                    del free[block]
                else:
                    self.num_draining -= 1  # `collect` will find it held and leave it alone
            block.ref_count += 1

    def free(self, blocks: Iterable[Block], busy_until: int = 0) -> None:
        """Drop one holder of each block. Those freed first are reused first.

        A block that step `busy_until` or an earlier holder's step may still touch stays out of
        reach until that step is collected.
        """
        for block in blocks:
            assert block.ref_count > 0, f"block {block.id} is freed twice"
            block.ref_count -= 1
            block.busy_until = max(block.busy_until, busy_until)
            if block.ref_count > 0:
                continue
            if block.busy_until > self._collected_step:
                self._draining[block.busy_until].append(block)
                self.num_draining += 1
            else:
                self._put_on_free_list(block)

    def collect(self, step_id: int) -> None:
        """Steps up to `step_id` touch nothing any more: what they kept busy may be reused."""
        self._collected_step = step_id
        for block in self._draining.pop(step_id, ()):
            # Touched meanwhile, and perhaps freed again: then it is not ours to free.
            still_draining = block.ref_count == 0 and block not in self._free
            if still_draining and block.busy_until <= step_id:
                self.num_draining -= 1
                self._put_on_free_list(block)

    def lookup(self, hashes: Iterable[bytes], group: int) -> list[Block | None]:
        """The blocks of a group that are known by these hashes; None where there is none."""
        return list(map(self._by_hash[group].get, hashes))

    def publish(self, block: Block, key: BlockKey) -> None:
        """Let others find the block by its content. The first block with a key keeps it."""
        assert block.ref_count > 0, f"block {block.id} has no holder who could know its content"
        assert block.key is None, f"block {block.id} has a key already"
        if self._by_hash[key[1]].setdefault(key[0], block) is block:
            block.key = key

    def forget_all(self) -> None:
        """Empty the prefix map; holders keep their blocks."""
        for by_hash in self._by_hash.values():
            for block in by_hash.values():
                block.key = None
        self._by_hash.clear()

    def _forget(self, block: Block) -> None:
        assert block.key is not None
        name, group = block.key
        del self._by_hash[group][name]
        block.key = None

    def _put_on_free_list(self, block: Block) -> None:
        self._free[block] = None
        if block.key is None:  # nobody can find its content: reuse it first
            self._free.move_to_end(block, last=False)
