"""`PrefixHashes`: how the prefix index recognises the leading blocks of one sequence."""

from __future__ import annotations

from array import array
from hashlib import blake2b

DIGEST_SIZE = 16  # bytes; also the size of blake2b's salt, which carries the parent's digest


class PrefixHashes:
    """The full blocks of a sequence's tokens as far as they were needed: what is in each, and a digest that chains.

    A block's digest covers its own tokens and, through its parent's digest as salt, all tokens before them and `root`:
    an integer of at most 0, so that it never equals the identity of a block. Hashes of different roots are never equal.
    """

    __slots__ = ("contents", "digests", "num_registered", "parent", "root")

    def __init__(self, root: int) -> None:
        self.root = root
        self.digests: list[bytes] = []
        self.contents: list[bytes] = []  # token ids, 4 bytes each
        self.num_registered = 0  # leading blocks of the present table that are in the index, as ours or as an equal
        self.parent = root  # identity of the last of these

    def extend(self, tokens: list[int], num_blocks: int, block_size: int) -> None:
        """Adds the blocks up to `num_blocks` that are not here yet; each is hashed once in a sequence's life."""
        first = len(self.digests)
        if num_blocks <= first:
            return
        digest = self.digests[-1] if first else self.root.to_bytes(DIGEST_SIZE, "little", signed=True)
        packed = array("i", tokens[first * block_size : num_blocks * block_size])
        data = packed.tobytes()
        num_bytes = block_size * packed.itemsize
        for offset in range(0, len(data), num_bytes):
            content = data[offset : offset + num_bytes]
            digest = blake2b(content, digest_size=DIGEST_SIZE, salt=digest).digest()
            self.digests.append(digest)
            self.contents.append(content)

    def detach(self) -> None:
        """Its sequence has lost its table."""
        self.num_registered = 0
        self.parent = self.root
