"""BlockPool: owns reference counts and the prefix map. Decides which block is reused next.

A block is in one of three states. Held: its reference count is above zero. Draining: nobody holds
it, but a step in flight may still access it. Free: it is on the free list. A free or draining block
keeps its key in the prefix map until it is handed out again. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable

NULL_BLOCK_ID = 0  # for padding and gaps; never handed out, never freed

BlockKey = tuple[bytes, int]  # hash of all tokens up to the block's end, group index


class Block:
    """One KV block of the pool."""

    __slots__ = ("busy_until", "id", "key", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None  # its key in the prefix map
        self.busy_until = 0  # the last step that may access it for a former holder


class BlockPool:
    """All blocks of the cache. `num_blocks` includes the null block."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"the null block alone makes 1, got {num_blocks}"
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.num_draining = 0
        self.on_evict: Callable[[BlockKey], None] | None = None
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
        """How many of these blocks are on the free list. `touch` would take them off it."""
        return sum(map(self._free.__contains__, blocks))

    def take(self, num_blocks: int) -> list[Block]:
        """Hand out the least recently used free blocks. The caller must check `num_free` first."""
        taken = []
        for _ in range(num_blocks):
            block, _ = self._free.popitem(last=False)
            if block.key is not None:
                self._forget(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, *blocks: Block) -> None:
        """Add a holder to cached blocks."""
        free, null_block = self._free, self.null_block
        for block in blocks:
            assert block is not null_block, "the null block has no holders"
            if block.ref_count == 0:
                if block in free:
                    del free[block]
                else:
                    self.num_draining -= 1  # `collect` skips it because it is held
            block.ref_count += 1

    def free(self, blocks: Iterable[Block], busy_until: int = 0) -> None:
        """Drop one holder of each block. Blocks freed first are reused first.

        A block that step `busy_until`, or a step of an earlier holder, may still access is not
        reused before that step is collected.
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
        """Steps up to `step_id` are done: the blocks that they kept busy may be reused."""
        self._collected_step = step_id
        for block in self._draining.pop(step_id, ()):
            # It may have been touched, and freed again, since it was listed here.
            still_draining = block.ref_count == 0 and block not in self._free
            if still_draining and block.busy_until <= step_id:
                self.num_draining -= 1
                self._put_on_free_list(block)

    def lookup(self, hashes: Iterable[bytes], group: int) -> list[Block | None]:
        """Return a group's cached block for each hash, None where there is none."""
        return list(map(self._by_hash[group].get, hashes))

    def cached_hashes(self, group: int) -> Iterable[bytes]:
        """All hashes of a group in the prefix map."""
        return self._by_hash[group].keys()

    def publish(self, block: Block, key: BlockKey) -> bool:
        """Add the block to the prefix map. If the key is taken, the first block keeps it.

        Returns whether the key is new.
        """
        assert block.ref_count > 0, f"block {block.id} has no holder who could know its content"
        assert block.key is None, f"block {block.id} has a key already"
        is_new = self._by_hash[key[1]].setdefault(key[0], block) is block
        if is_new:
            block.key = key
        return is_new

    def forget_all(self) -> None:
        """Empty the prefix map. Holders keep their blocks."""
        for by_hash in self._by_hash.values():
            for block in by_hash.values():
                block.key = None
        self._by_hash.clear()

    def _forget(self, block: Block) -> None:
        assert block.key is not None
        name, group = block.key
        del self._by_hash[group][name]
        if self.on_evict is not None:
            self.on_evict(block.key)
        block.key = None

    def _put_on_free_list(self, block: Block) -> None:
        self._free[block] = None
        if block.key is None:  # not in the prefix map: reuse it first
            self._free.move_to_end(block, last=False)
