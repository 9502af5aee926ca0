"""How much memory the KV cache takes, and what it holds at first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchjob.cgroup import MemoryGroup
from batchjob.engine import kv_cache
from batchjob.engine.kv_cache import KVCache, LayerShape, available_memory, bytes_per_block, choose_num_blocks
from batchjob.errors import EngineError

CPU = torch.device("cpu")


def test_a_cache_is_zero_and_has_one_block_to_spare() -> None:
    cache = KVCache([LayerShape(2, 8), LayerShape(1, 16)], num_blocks=3, block_size=4, dtype=torch.float32, device=CPU)
    assert [tuple(layer.shape) for layer in cache.layers] == [(4, 2, 2, 4, 8), (4, 2, 1, 4, 16)]
    assert not any(bool(layer.any()) for layer in cache.layers)
    assert cache.null_block == 3
    assert cache.num_bytes == 4 * bytes_per_block(
        [LayerShape(2, 8), LayerShape(1, 16)], block_size=4, dtype=torch.float32
    )


def test_the_users_bytes_are_kept_to_the_spare_block_included() -> None:
    assert choose_num_blocks(100, kv_cache_bytes=1000, max_useful_blocks=50) == 9
    assert choose_num_blocks(100, kv_cache_bytes=1099, max_useful_blocks=50) == 9


def test_no_more_blocks_than_rows_can_fill() -> None:
    assert choose_num_blocks(100, kv_cache_bytes=10**9, max_useful_blocks=50) == 50


def test_a_quarter_of_the_free_memory_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 40_000)
    assert choose_num_blocks(100, kv_cache_bytes=None, max_useful_blocks=10**9) == 99


def test_what_a_gpu_has_left_is_used_up() -> None:
    assert choose_num_blocks(100, kv_cache_bytes=None, available=40_000, max_useful_blocks=10**9) == 399


def test_too_little_memory_is_an_error_that_says_how_much_is_needed() -> None:
    with pytest.raises(EngineError, match=r"150 bytes hold no KV cache: two blocks need 200; .*--kv-cache-memory"):
        choose_num_blocks(100, kv_cache_bytes=150, max_useful_blocks=50)


def test_memory_limits_of_control_groups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "job" / "step"
    group.mkdir(parents=True)
    (tmp_path / "job" / "memory.max").write_text("1000000\n")
    (tmp_path / "job" / "memory.current").write_text("700000\n")
    (tmp_path / "job" / "memory.stat").write_text("anon 600000\ninactive_file 50000\n")
    (group / "memory.max").write_text("max\n")
    monkeypatch.setattr(kv_cache, "memory_groups", lambda: [MemoryGroup(group, tmp_path, 2)])
    assert available_memory() == 350_000
