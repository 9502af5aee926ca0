"""`BlockPool`: which KV blocks are free, which are shared, and which hold a prefix that can be used again.

A block is `block_size` token positions of every layer, known here only by its index. The pool knows nothing of
sequences, queues or tensors. As in vLLM, full blocks are found by chained hashes, and blocks without a holder are
evicted first in, first out; as in nano-vllm, a hit is confirmed by comparing tokens.

A block is always in exactly one of three places:

    empty       no holder, and nothing in it is worth keeping           list, last freed first out
    cached      no holder, but it is in the index: may be hit           OrderedDict, oldest first = eviction order
    referenced  in the tables of `refs` holders; in the index or not
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from batchjob.core.prefix_hash import PrefixHashes


class BlockPool:
    """`num_blocks` KV blocks of `block_size` tokens. Every operation is O(1) per block it is given."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and a block size, not {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        # The index, and what it knows of each block in it: its digest (None: not in the index), its tokens, an
        # identity that is never used twice, and the identity of the block before it (or the root of its chain).
        # Equal tokens after an equal parent are, by induction, an equal prefix: a hit rests on no hash.
        self._index: dict[bytes, int] = {}
        self._digests: list[bytes | None] = [None] * num_blocks
        self._contents = [b""] * num_blocks
        self._ids = [0] * num_blocks
        self._parents = [0] * num_blocks
        self._last_id = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: empty ones and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return len(self._cached)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """Counts the blocks without a holder: `share` takes these out of the free ones."""
        refs = self._refs
        return sum(not refs[block] for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks of undefined content, each with one holder. Evicts the oldest cached ones when no
        empty ones are left.

        The caller makes sure that `count <= num_free`.
        """
        assert count <= self.num_free
        empty = self._empty
        blocks = []
        for _ in range(count):
            block = empty.pop() if empty else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each of `blocks`, which `match` has just found."""
        refs = self._refs
        for block in blocks:
            if not refs[block]:
                del self._cached[block]
            refs[block] += 1

    def free(self, blocks: list[int]) -> None:
        """Takes a holder from each block of a table, from the back, so that a prefix is evicted from its tail."""
        refs = self._refs
        for block in reversed(blocks):
            assert refs[block] > 0
            refs[block] -= 1
            if not refs[block]:
                if self._digests[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def match(self, hashes: PrefixHashes, num_blocks: int) -> list[int]:
        """Returns the blocks of the longest indexed prefix, of at most `num_blocks`, without taking them."""
        blocks: list[int] = []
        parent = hashes.root
        for i in range(num_blocks):
            block = self._index.get(hashes.digests[i])
            if block is None or not self._holds(block, parent, hashes.contents[i]):
                break
            blocks.append(block)
            parent = self._ids[block]
        return blocks

    def adopt(self, hashes: PrefixHashes, blocks: list[int]) -> None:
        """Notes that the block table of these hashes starts with `blocks`, which `match` has found."""
        hashes.num_registered = len(blocks)
        hashes.parent = self._ids[blocks[-1]] if blocks else hashes.root

    def register(self, hashes: PrefixHashes, blocks: list[int], num_blocks: int) -> None:
        """Puts the blocks of a table up to `num_blocks`, which are full and computed, into the index.

        Where the same prefix is in the index already, that block stays and ours remains private. An entry of the same
        digest but another prefix, or one whose parent was evicted and registered again, gives way.
        """
        parent = hashes.parent
        for i in range(hashes.num_registered, num_blocks):
            digest, content = hashes.digests[i], hashes.contents[i]
            block = self._index.get(digest)
            if block is None or not self._holds(block, parent, content):
                if block is not None:
                    self._remove(block)
                block = blocks[i]
                self._last_id += 1
                self._index[digest] = block
                self._digests[block] = digest
                self._contents[block] = content
                self._ids[block] = self._last_id
                self._parents[block] = parent
            parent = self._ids[block]
        hashes.parent = parent
        hashes.num_registered = num_blocks

    def _holds(self, block: int, parent: int, content: bytes) -> bool:
        return self._parents[block] == parent and self._contents[block] == content

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _remove(self, block: int) -> None:
        self._forget(block)
        if not self._refs[block]:
            del self._cached[block]
            self._empty.append(block)

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        assert digest is not None
        del self._index[digest]
        self._digests[block] = None

    def check(self, tables: Iterable[list[int]], *, writable: Iterable[int] = ()) -> None:
        """Asserts the invariants, given the tables of all holders and the blocks they may still write to. For tests."""
        holders = Counter(block for table in tables for block in table)
        empty = set(self._empty)
        assert len(empty) == len(self._empty)
        for block, refs in enumerate(self._refs):
            digest = self._digests[block]
            assert refs == holders[block], f"block {block} has {refs} references and is in {holders[block]} tables"
            assert (block in empty) == (refs == 0 and digest is None)
            assert (block in self._cached) == (refs == 0 and digest is not None)
            if digest is not None:
                assert self._index[digest] == block
                assert self._parents[block] < self._ids[block] <= self._last_id
        for block in writable:
            assert holders[block] == 1, f"block {block} is still written to, but shared"
            assert self._digests[block] is None, f"block {block} is still written to, but in the index"
        assert len(self._index) == self.num_blocks - self._digests.count(None)
        assert self.num_free == self._refs.count(0)
