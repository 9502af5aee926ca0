"""`BlockPool`: which KV blocks are free, which are shared, and which hold a prefix that can be used again.

A block is `block_size` token positions of every layer, known here only by its index. The pool knows nothing of
sequences, queues or tensors. The prefix index follows vLLM's (chained hashes of full blocks, a first-in-first-out
queue of blocks that nobody holds); a hit is confirmed by comparing tokens, as in nano-vllm.

A block is always in exactly one of three places:

    empty       nobody holds it and nothing in it is worth keeping       list, last freed first out
    cached      nobody holds it, but it is in the index: may be hit       OrderedDict, oldest first = eviction order
    referenced  in the tables of `refs` sequences; in the index or not
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

DIGEST_SIZE = 16  # bytes; also the size of blake2b's salt, which carries the parent's digest


def extend_digests(digests: list[bytes], tokens: list[int], num_blocks: int, *, block_size: int, root: int) -> None:
    """Appends the digests of the first `num_blocks` full blocks of `tokens` that `digests` does not hold yet.

    A block's digest covers its own tokens and, through its parent's digest as salt, every token before them and `root`.
    Chains of different roots never meet.
    """
    first = len(digests)
    if num_blocks <= first:
        return
    parent = digests[-1] if digests else root.to_bytes(DIGEST_SIZE, "little", signed=True)
    packed = array("q", tokens[first * block_size : num_blocks * block_size])
    num_bytes = block_size * packed.itemsize
    data = memoryview(packed).cast("B")
    for offset in range(0, len(data), num_bytes):
        parent = blake2b(data[offset : offset + num_bytes], digest_size=DIGEST_SIZE, salt=parent).digest()
        digests.append(parent)


class _Entry(NamedTuple):
    """What the index knows of a block. `uid` is unique over the pool's life; `parent` is the uid of the block before.

    Equal tokens under an equal parent identity mean, by induction, an equal prefix: a hit rests on no hash.
    """

    digest: bytes
    tokens: list[int]
    uid: int
    parent: int


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
        self._index: dict[bytes, int] = {}
        self._entries: list[_Entry | None] = [None] * num_blocks
        self._last_uid = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: empty ones and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return len(self._cached)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds, so that `share` takes them out of the free ones."""
        refs = self._refs
        return sum(not refs[block] for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of undefined content, held once; evicts the oldest cached ones when no empty ones are left.

        The caller makes sure that `count <= num_free`.
        """
        assert count <= self.num_free
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of `blocks`, which `match` has just found."""
        refs = self._refs
        for block in blocks:
            if not refs[block]:
                del self._cached[block]
            refs[block] += 1

    def free(self, blocks: list[int]) -> None:
        """One holder less for each block of a table. From the back, so that the tail of a prefix is evicted first."""
        refs = self._refs
        for block in reversed(blocks):
            assert refs[block] > 0
            refs[block] -= 1
            if not refs[block]:
                if self._entries[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def match(self, digests: list[bytes], tokens: list[int], *, root: int) -> list[int]:
        """The blocks that hold the longest indexed prefix of `tokens`, without taking them (`share` does).

        Never covers the last token: it has to be computed for its logits, and a shared block is never written to. So
        a prompt that ends with a block computes that block again in a block of its own.
        """
        size = self.block_size
        blocks: list[int] = []
        parent = root
        for start in range(0, len(tokens) - size, size):
            block = self._index.get(digests[start // size])
            if block is None:
                break
            entry = self._entries[block]
            assert entry is not None
            if entry.parent != parent or entry.tokens != tokens[start : start + size]:
                break
            blocks.append(block)
            parent = entry.uid
        return blocks

    def identity(self, block: int) -> int:
        """The identity of the whole prefix that ends with an indexed block."""
        entry = self._entries[block]
        assert entry is not None
        return entry.uid

    def register(
        self, blocks: list[int], digests: list[bytes], tokens: list[int], *, first: int, last: int, parent: int
    ) -> int:
        """Puts the computed full blocks `blocks[first:last]` of a table into the index.

        `parent` is the identity of the prefix before them (or the root), and the identity of the prefix up to `last`
        is returned. Where the same prefix is in the index already, that block stays and ours remains private. An entry
        of the same digest but another prefix, or one whose parent was evicted, is out of reach and gives way.
        """
        size = self.block_size
        for i in range(first, last):
            block, digest, content = blocks[i], digests[i], tokens[i * size : (i + 1) * size]
            known = self._index.get(digest)
            if known is not None:
                entry = self._entries[known]
                assert entry is not None
                if entry.parent == parent and entry.tokens == content:
                    parent = entry.uid
                    continue
                self._forget(known)
                if not self._refs[known]:
                    del self._cached[known]
                    self._empty.append(known)
            self._last_uid += 1
            self._index[digest] = block
            self._entries[block] = _Entry(digest, content, self._last_uid, parent)
            parent = self._last_uid
        return parent

    def _forget(self, block: int) -> None:
        entry = self._entries[block]
        assert entry is not None
        del self._index[entry.digest]
        self._entries[block] = None

    def check(self, tables: Iterable[list[int]]) -> None:
        """Asserts the invariants, given the block tables of all holders. O(blocks): for tests."""
        holders = Counter(block for table in tables for block in table)
        empty = set(self._empty)
        assert len(empty) == len(self._empty)
        for block, refs in enumerate(self._refs):
            entry = self._entries[block]
            assert refs == holders[block], f"block {block} has {refs} references but is in {holders[block]} tables"
            assert (block in empty) == (refs == 0 and entry is None)
            assert (block in self._cached) == (refs == 0 and entry is not None)
            if entry is not None:
                assert self._index[entry.digest] == block
                assert len(entry.tokens) == self.block_size
                assert entry.parent < entry.uid <= self._last_uid
        assert len(self._index) == sum(entry is not None for entry in self._entries)
        assert self.num_free == self._refs.count(0)
