import pytest

from batchjob.core import BlockPool
from batchjob.core import prefix_hash as chain_module
from batchjob.core.prefix_hash import PrefixHashes

SIZE = 4


def chain_of(tokens: list[int], root: int = 0) -> PrefixHashes:
    chain = PrefixHashes(root)
    chain.extend(tokens, len(tokens) // SIZE, SIZE)
    return chain


def fill(pool: BlockPool, tokens: list[int], root: int = 0) -> tuple[list[int], PrefixHashes]:
    """A table with the full blocks of `tokens`, all in the index."""
    chain = chain_of(tokens, root)
    blocks = pool.allocate(len(chain.digests))
    pool.register(chain, blocks, len(blocks))
    return blocks, chain


def match(pool: BlockPool, tokens: list[int], root: int = 0) -> list[int]:
    chain = chain_of(tokens, root)
    return pool.match(chain, len(chain.digests))


def test_every_block_is_handed_out_once_and_comes_back():
    pool = BlockPool(5, SIZE)
    blocks = pool.allocate(5)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check([blocks])
    pool.free(blocks)
    assert pool.num_free == 5
    pool.check([])


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(2, SIZE)
    blocks, _ = fill(pool, [1, 2, 3, 4])
    pool.share(blocks)
    pool.check([blocks, blocks])
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2


def test_a_freed_prefix_is_found_again():
    pool = BlockPool(8, SIZE)
    blocks, _ = fill(pool, list(range(12)))
    pool.free(blocks)
    assert pool.num_cached == 3
    assert match(pool, list(range(12))) == blocks
    assert match(pool, [*range(8), 99, 99, 99, 99]) == blocks[:2]
    assert match(pool, [99, *range(11)]) == []
    pool.share(blocks)
    assert pool.num_cached == 0
    pool.check([blocks])


def test_a_block_is_found_only_after_the_same_tokens():
    pool = BlockPool(8, SIZE)
    fill(pool, [1, 1, 1, 1, 5, 6, 7, 8])
    assert match(pool, [5, 6, 7, 8]) == []
    assert match(pool, [2, 2, 2, 2, 5, 6, 7, 8]) == []


def test_roots_keep_chains_apart():
    pool = BlockPool(8, SIZE)
    fill(pool, [1, 2, 3, 4], root=-1)
    assert match(pool, [1, 2, 3, 4], root=0) == []
    assert match(pool, [1, 2, 3, 4], root=-2) == []
    assert len(match(pool, [1, 2, 3, 4], root=-1)) == 1


def test_empty_blocks_are_used_before_cached_ones_are_evicted():
    pool = BlockPool(4, SIZE)
    blocks, _ = fill(pool, list(range(8)))
    scratch = pool.allocate(2)
    pool.free(blocks)
    pool.free(scratch)
    assert sorted(pool.allocate(2)) == sorted(scratch)
    assert match(pool, list(range(8))) == blocks


def test_the_oldest_prefix_is_evicted_first_and_its_tail_before_its_head():
    pool = BlockPool(4, SIZE)
    old, _ = fill(pool, [1] * 8)
    new, _ = fill(pool, [2] * 8)
    pool.free(old)
    pool.free(new)
    assert pool.allocate(1) == old[1:]
    assert match(pool, [1] * 8) == old[:1]
    assert pool.allocate(1) == old[:1]
    assert match(pool, [2] * 8) == new


def test_a_hit_makes_a_prefix_young_again():
    pool = BlockPool(2, SIZE)
    first, _ = fill(pool, [1] * 4)
    second, _ = fill(pool, [2] * 4)
    pool.free(first)
    pool.free(second)
    pool.share(first)
    pool.free(first)
    assert pool.allocate(1) == second


def test_a_block_with_the_same_prefix_as_an_indexed_one_stays_private():
    pool = BlockPool(4, SIZE)
    first, _ = fill(pool, [1] * 4)
    second, _ = fill(pool, [1] * 4)
    assert match(pool, [1] * 4) == first
    pool.free(second)
    assert pool.num_cached == 0
    pool.check([first])


def test_a_child_of_an_evicted_block_is_out_of_reach_until_it_is_registered_anew():
    pool = BlockPool(4, SIZE)
    tokens = [1] * 4 + [2] * 4
    head, _ = fill(pool, [1] * 4)
    table = pool.allocate(2)
    chain = chain_of(tokens)
    pool.register(chain, table, 2)  # the head is known already; only the child enters the index
    assert match(pool, tokens) == [head[0], table[1]]
    pool.free(head)
    others = pool.allocate(2)  # evicts the head
    assert match(pool, tokens) == []
    pool.check([table, others])
    again = chain_of(tokens)
    pool.register(again, table, 2)
    assert match(pool, tokens) == table


def test_equal_digests_of_different_tokens_are_no_hit(monkeypatch: pytest.MonkeyPatch):
    class Constant:
        def __init__(self, *_: object, **__: object) -> None: ...

        def digest(self) -> bytes:
            return bytes(chain_module.DIGEST_SIZE)

    monkeypatch.setattr(chain_module, "blake2b", Constant)
    pool = BlockPool(4, SIZE)
    first, _ = fill(pool, [1] * 4)
    assert match(pool, [1] * 4) == first
    assert match(pool, [2] * 4) == []
    second, _ = fill(pool, [2] * 4)  # takes the place of the first in the index
    assert match(pool, [2] * 4) == second
    assert match(pool, [1] * 4) == []
    pool.check([first, second])


def test_equal_digests_and_tokens_after_another_prefix_are_no_hit(monkeypatch: pytest.MonkeyPatch):
    class Unchained:
        def __init__(self, content: bytes, **_: object) -> None:
            self.content = content

        def digest(self) -> bytes:
            return self.content[: chain_module.DIGEST_SIZE]

    monkeypatch.setattr(chain_module, "blake2b", Unchained)
    pool = BlockPool(8, SIZE)
    first, _ = fill(pool, [1] * 4 + [3] * 4)
    second, _ = fill(pool, [2] * 4)
    assert match(pool, [1] * 4 + [3] * 4) == first
    assert match(pool, [2] * 4 + [3] * 4) == second
    assert match(pool, [3] * 4) == []


def test_digests_are_made_once_however_the_chain_grows():
    tokens = list(range(40))
    grown = PrefixHashes(0)
    for num_blocks in (1, 3, 3, 2, 10):
        grown.extend(tokens, num_blocks, SIZE)
    assert grown.digests == chain_of(tokens).digests
    assert len(set(grown.digests)) == 10


def test_check_finds_a_lost_block():
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="has 1 references and is in 0 tables"):
        pool.check([blocks[:1]])


def test_check_finds_a_shared_block_that_is_still_written_to():
    pool = BlockPool(4, SIZE)
    blocks, _ = fill(pool, [1] * 4)
    pool.share(blocks)
    with pytest.raises(AssertionError, match="still written to, but shared"):
        pool.check([blocks, blocks], writable=blocks)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (16, 0), (-1, 16)])
def test_a_pool_without_blocks_is_refused(num_blocks: int, block_size: int):
    with pytest.raises(ValueError, match="a pool needs blocks"):
        BlockPool(num_blocks, block_size)
