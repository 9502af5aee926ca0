"""The Triton backend against the reference: random ragged steps in every type, splits, contexts, lengths on the device,
bitwise equality of deterministic steps. In the interpreter, or on a CUDA device where there is one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from batchjob_kernels import AttnMeta, Context, DeviceLens, Requirements  # noqa: E402
from batchjob_kernels.attention import reference  # noqa: E402
from batchjob_kernels.attention import triton as backend  # noqa: E402
from batchjob_kernels.triton_kernels import (  # noqa: E402
    attention_plan,
    attention_shapes,
    available,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
# Relative to the largest output: the arithmetic is in float32, products of 16-bit types take rounded weights.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
Check = Callable[[str, Tensor, Tensor, float], None]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def device_of_many(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`device_of_many(n)`: launches are cut as for n multiprocessors, and from the first key on."""

    def pretend(multiprocessors: int) -> None:
        monkeypatch.setattr(attention_plan, "device_facts", lambda device: ((9, 0), multiprocessors))
        monkeypatch.setattr(attention_shapes, "MIN_SPLIT_KEYS", 1)

    return pretend


@dataclass
class Case:
    query_lens: list[int]
    kv_lens: list[int]
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # None: as dtype
    contexts: tuple[Context, ...] = ()
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    on_device: bool = False  # lengths and rows as tensors, host lengths as in a captured graph
    num_padding: int = 0  # sequences at the end that own no block: one token in the null block
    deterministic: bool = False
    seed: int = 0
    meta: AttnMeta = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        num_seqs, size = len(self.query_lens), self.block_size
        width = max(-(-length // size) for length in self.kv_lens)
        null = num_seqs * width
        table = torch.randperm(null, generator=generator).view(num_seqs, width)
        for c in self.contexts:
            table[c.first_seq : c.last_seq, c.first_block : c.last_block] = table[
                c.first_seq, c.first_block : c.last_block
            ].clone()
        for row, length in enumerate(self.kv_lens):
            table[row, -(-length // size) :] = null
        self.query_lens = self.query_lens + [1] * self.num_padding
        self.kv_lens = self.kv_lens + [1] * self.num_padding
        table = torch.cat((table, torch.full((self.num_padding, width), null)))
        slot_mapping = [
            int(table[row, position // size]) * size + position % size
            for row, (new, length) in enumerate(zip(self.query_lens, self.kv_lens, strict=True))
            for position in range(length - new, length)
        ]
        num_tokens = len(slot_mapping)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        self.q = normal(num_tokens, self.num_kv_heads * self.group, self.head_dim)
        self.kv = normal(num_tokens, 2, self.num_kv_heads, self.head_dim)
        self.cache = normal(null + 1, 2, self.num_kv_heads, size, self.head_dim).to(self.kv_dtype or self.dtype)
        self.sinks = torch.linspace(-1, 2, self.num_kv_heads * self.group).to(self.dtype) if self.with_sinks else None
        self.scale = self.head_dim**-0.5
        # For the reference: one row per sequence, all on the host.
        self.meta = AttnMeta(
            self.query_lens, self.kv_lens, table, torch.tensor(slot_mapping), size, list(self.contexts)
        )

    def expected(self) -> Tensor:
        """In float32, from the numbers that the cache holds once the step's keys and values are stored."""
        cache = self.cache.float()
        kv = self.kv.float().to(self.cache.dtype).float()
        reference.write_kv(kv, cache, self.meta)
        return reference.paged_attention(
            self.q.float(),
            kv,
            cache,
            self.meta,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def device_meta(self) -> AttnMeta:
        meta = replace(self.meta, memo={}, deterministic=self.deterministic)
        if not self.on_device:
            return replace(meta, block_table=meta.block_table.to(DEVICE), slot_mapping=meta.slot_mapping.to(DEVICE))
        # The table of all slots, of which the step takes some, in another order.
        num_seqs = len(meta.query_lens)
        rows = torch.randperm(num_seqs + 3, generator=torch.Generator().manual_seed(self.seed))[:num_seqs]
        table = torch.full((num_seqs + 3, meta.block_table.shape[1]), len(self.cache) - 1, dtype=torch.int32)
        table[rows] = meta.block_table.int()
        starts = torch.tensor([0, *meta.query_lens]).cumsum(0)
        lens = DeviceLens(*(t.int().to(DEVICE) for t in (starts, torch.tensor(meta.kv_lens), rows)))
        return replace(
            meta,
            block_table=table.to(DEVICE),
            slot_mapping=meta.slot_mapping.to(DEVICE),
            device_lens=lens,
            kv_lens=[1] * num_seqs,
        )

    def actual(self, meta: AttnMeta | None = None) -> Tensor:
        meta = meta or self.device_meta()
        cache, q, kv = self.cache.to(DEVICE, copy=True), self.q.to(DEVICE), self.kv
        if self.kv_dtype == FP8 and DEVICE.type == "cpu":
            kv = kv.to(FP8).to(kv.dtype)  # the interpreter does not round to the nearest
        backend.write_kv(kv.to(DEVICE), cache, meta)
        return backend.paged_attention(
            q,
            None,
            cache,
            meta,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.to(DEVICE),
        )

    def check(self, check_close: Check) -> None:
        kind = "attention, fp8 cache" if self.kv_dtype == FP8 else "attention"
        check_close(kind, self.actual(), self.expected(), TOLERANCE[self.dtype])


@pytest.fixture
def _products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a matrix product is the host's, whose bits depend on a row's place; the hardware's do not."""
    if DEVICE.type == "cuda":
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        result = d.data.copy()
        for k in range(a.data.shape[1]):
            result += a.data[:, k, None].astype("f4") * b.data[None, k].astype("f4")
        return interpreter.TensorHandle(result, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def random_case(seed: int, largest: int) -> Case:
    """Any mix of what a step can be, with at most about `largest` sequences."""
    rng = random.Random(seed)
    is_decode = rng.random() < 0.4
    query_lens = [1 if is_decode or rng.random() < 0.4 else rng.randint(2, 40) for _ in range(rng.randint(1, largest))]
    kv_lens = [new + rng.choice([0, rng.randint(0, 20), rng.randint(0, 150)]) for new in query_lens]
    dtype = rng.choice(list(TOLERANCE))
    block_size = rng.choice([1, 4, 16, 16, 32])
    window = rng.choice([None, None, rng.randint(1, 60)])
    contexts: tuple[Context, ...] = ()
    first = rng.randrange(len(query_lens))
    last = rng.randint(first + 1, len(query_lens))
    shared = min(kv - new for kv, new in list(zip(kv_lens, query_lens, strict=True))[first:last]) // block_size
    if shared and rng.random() < 0.7:
        contexts = (Context(first, last, 0, shared),)
        if shared > 1 and last - first > 1:
            contexts = (Context(first, last, 0, 1), Context(first, last - 1, 1, shared))
    return Case(
        query_lens,
        kv_lens,
        num_kv_heads=rng.choice([1, 2]),
        group=rng.choice([1, 3, 4, 7, 8]),
        head_dim=rng.choice([16, 24, 64, 80, 96, 128]),
        block_size=block_size,
        dtype=dtype,
        kv_dtype=rng.choice([None, None, FP8]),
        contexts=contexts,
        window=window,
        softcap=rng.choice([None, None, 5.0]),
        with_sinks=rng.random() < 0.3,
        on_device=rng.random() < 0.5,
        num_padding=rng.choice([0, 2]),
        deterministic=rng.random() < 0.2,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(14))
def test_random_steps(seed: int, device_of_many: Callable[[int], None], check_close: Check) -> None:
    device_of_many(random.Random(seed).choice([0, 1, 4]))
    random_case(seed, largest=4).check(check_close)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_more_random_steps(seed: int, device_of_many: Callable[[int], None], check_close: Check) -> None:
    device_of_many(random.Random(seed).choice([0, 0, 1, 4]))
    random_case(seed, largest=8).check(check_close)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["", "fp8"])
def test_a_mixed_step_in_every_type(dtype: torch.dtype, kv_dtype: torch.dtype | None, check_close: Check) -> None:
    Case([1, 9, 1, 20], [70, 9, 1, 31], dtype=dtype, kv_dtype=kv_dtype, head_dim=64).check(check_close)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 24])
def test_groups_of_any_size_share_a_tile(group: int, check_close: Check) -> None:
    Case([1, 1, 1], [5, 40, 17], group=group, num_kv_heads=1).check(check_close)
    Case([19, 1], [30, 70], group=group, num_kv_heads=1).check(check_close)


@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 256, 512])
def test_head_sizes(head_dim: int, check_close: Check) -> None:
    Case([1, 18], [50, 40], head_dim=head_dim, dtype=torch.bfloat16, num_kv_heads=1).check(check_close)


@pytest.mark.parametrize("num_tokens", [31, 32, 33])
@pytest.mark.parametrize("before", [0, 1, 32])
def test_prompts_around_the_edge_of_a_tile(num_tokens: int, before: int, check_close: Check) -> None:
    Case([num_tokens], [num_tokens + before], num_kv_heads=1, group=1).check(check_close)


def test_lengths_come_from_the_device_and_padding_rows_do_no_harm(check_close: Check) -> None:
    case = Case([1] * 5, [3, 90, 17, 64, 65], on_device=True, num_padding=3, softcap=4.0, with_sinks=True)
    case.check(check_close)
    Case([1, 8, 1, 30], [3, 90, 17, 64], on_device=True, num_padding=1).check(check_close)


@pytest.mark.parametrize("multiprocessors", [1, 3])
def test_keys_cut_into_parts(multiprocessors: int, device_of_many: Callable[[int], None], check_close: Check) -> None:
    """Up to more parts than there are tiles: the parts without keys count for nothing."""
    device_of_many(multiprocessors)
    case = Case([1, 1], [200, 2], num_kv_heads=1, with_sinks=True)
    meta = case.device_meta()
    check_close("attention, split", case.actual(meta), case.expected(), TOLERANCE[case.dtype])
    assert plan_of(meta).own.num_splits == min(64, 8 * multiprocessors // 2)
    Case([30, 1], [140, 30], num_kv_heads=1).check(check_close)
    Case([1, 1], [200, 2], num_kv_heads=1, window=70).check(check_close)


def plan_of(meta: AttnMeta) -> attention_plan.Plan:
    (plan,) = (value for value in meta.memo.values() if isinstance(value, attention_plan.Plan))
    return plan


def test_parts_do_not_depend_on_lengths_or_the_width_of_the_table(device_of_many: Callable[[int], None]) -> None:
    device_of_many(132)
    use = attention_plan.Use(2, 2, 16, 2, True)
    metas = [Case([1] * 4, kv_lens).device_meta() for kv_lens in ([1] * 4, [1, 1, 1, 900])]
    plans = [attention_plan.plan(meta, use, DEVICE) for meta in metas]
    assert plans[0].own.num_splits == plans[1].own.num_splits == 64
    assert [plan.own.num_tiles for plan in plans] == [4, 4]
    assert attention_shapes.choose_splits(256 * 8, 132) == 1


@pytest.mark.parametrize("multiprocessors", [0, 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_shared_blocks_are_read_apart_and_merged(
    multiprocessors: int, on_device: bool, device_of_many: Callable[[int], None], check_close: Check
) -> None:
    device_of_many(multiprocessors)
    contexts = (Context(0, 5, 0, 4), Context(1, 4, 4, 10), Context(2, 4, 10, 11))
    case = Case([1, 1, 7, 1, 2, 1], [80, 170, 183, 177, 66, 30], contexts=contexts, with_sinks=True)
    case = replace(case, on_device=on_device)
    meta = case.device_meta()
    check_close("attention, contexts", case.actual(meta), case.expected(), TOLERANCE[case.dtype])
    plan = plan_of(meta)
    assert plan.shared is not None
    assert plan.begins is not None
    assert plan.begins.tolist() == [64, 160, 176, 176, 64, 0]
    assert plan.num_shared_parts == 3 * plan.shared.num_splits


def test_contexts_are_left_aside_where_they_do_not_pay(monkeypatch: pytest.MonkeyPatch, check_close: Check) -> None:
    case = Case([1, 1], [40, 41], contexts=(Context(0, 2, 0, 2),))
    for change in ({"window": 30}, {"deterministic": True}):
        changed = replace(case, **change)
        meta = changed.device_meta()
        check_close("attention", changed.actual(meta), changed.expected(), TOLERANCE[case.dtype])
        assert plan_of(meta).shared is None
    monkeypatch.setattr(attention_plan, "MIN_SAVED_KEYS", 33)
    meta = case.device_meta()
    check_close("attention", case.actual(meta), case.expected(), TOLERANCE[case.dtype])
    assert plan_of(meta).shared is None
    monkeypatch.setattr(attention_plan, "MIN_SAVED_KEYS", 32)
    monkeypatch.setattr(attention_plan, "MAX_PARTIAL_BYTES", 2 * 2 * 4 * 16 * 4 - 1)
    meta = case.device_meta()
    case.actual(meta)
    assert plan_of(meta).shared is None


@pytest.mark.usefixtures("_products_row_by_row")
@pytest.mark.parametrize("features", [{"with_sinks": True}, {"window": 11, "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_deterministic_rows_are_the_same_bits_in_any_step(dtype: torch.dtype, features: dict[str, Any]) -> None:
    """A sequence of 67 tokens: as one prompt; as two parts cut anywhere; its tokens one by one among other rows."""
    length = 67
    whole = Case([length], [length], group=3, num_kv_heads=1, dtype=dtype, deterministic=True, **features)
    cache = whole.cache.to(DEVICE, copy=True)
    q, kv = whole.q.to(DEVICE), whole.kv.to(DEVICE)
    meta = whole.device_meta()
    backend.write_kv(kv, cache, meta)
    sinks = None if whole.sinks is None else whole.sinks.to(DEVICE)
    more = {"scale": whole.scale, "window": whole.window, "softcap": whole.softcap, "sinks": sinks}
    expected = backend.paged_attention(q, None, cache, meta, **more)
    for cut in range(1, length) if DEVICE.type == "cuda" else (1, 16, 33, 64):
        parts = [
            backend.paged_attention(
                q[first:last],
                None,
                cache,
                replace(meta, query_lens=[last - first], kv_lens=[last], memo={}),
                **more,
            )
            for first, last in ((0, cut), (cut, length))
        ]
        assert torch.equal(torch.cat(parts), expected), f"cut after {cut} tokens"
    rows = [0, 21, 63, 64, 66]
    decode = replace(
        meta,
        query_lens=[1] * len(rows),
        kv_lens=[row + 1 for row in rows],
        block_table=meta.block_table.expand(len(rows), -1),
        memo={},
    )
    assert torch.equal(backend.paged_attention(q[rows], None, cache, decode, **more), expected[rows])


def test_deterministic_steps_take_one_tile_shape() -> None:
    for query_lens, kv_lens in (([1], [9]), ([1] * 3, [9, 200, 4]), ([64, 1], [64, 30]), ([500], [500])):
        meta = Case(query_lens, kv_lens, deterministic=True).device_meta()
        plan = attention_plan.plan(meta, attention_plan.Use(2, 2, 16, 2, True), DEVICE)
        assert plan.own.shape == attention_shapes.choose_shape("deterministic", 16, 2, 2, (9, 0))
        assert plan.own.tiles is not None
        assert plan.num_parts == 1


def test_a_view_of_merged_projections_needs_no_copy(check_close: Check) -> None:
    case = Case([1, 5], [20, 5])
    qkv = torch.cat((case.q.flatten(1), case.kv.flatten(1)), dim=1).to(DEVICE)
    heads = case.num_kv_heads * case.group
    q = qkv[:, : heads * case.head_dim].unflatten(1, (heads, -1))
    kv = qkv[:, heads * case.head_dim :].unflatten(1, (2, case.num_kv_heads, -1))
    cache, meta = case.cache.to(DEVICE, copy=True), case.device_meta()
    backend.write_kv(kv, cache, meta)
    out = backend.paged_attention(q, kv, cache, meta, scale=case.scale)
    assert out.is_contiguous()
    check_close("attention", out, case.expected(), TOLERANCE[case.dtype])


@pytest.mark.parametrize("dtype", [*TOLERANCE, FP8], ids=str)
def test_writes_numbers_that_the_cache_can_hold(dtype: torch.dtype, check_close: Check) -> None:
    case = Case([3, 1], [6, 17], num_kv_heads=3, head_dim=24, kv_dtype=dtype)
    if DEVICE.type == "cpu":
        case.kv = case.kv.to(dtype).to(case.kv.dtype)  # see Case.actual
    case.kv[0, 0, 0, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 9984.0, -9984.0, 448.0])
    cache = torch.zeros_like(case.cache.float()).to(dtype).to(DEVICE)
    backend.write_kv(case.kv.to(DEVICE), cache, case.device_meta())
    expected = torch.nan_to_num(case.kv, nan=0.0, posinf=0.0, neginf=0.0)
    if dtype == FP8:
        expected = expected.clamp(-448, 448)
    flat = cache.float().cpu().permute(0, 3, 1, 2, 4).flatten(0, 1)  # by slot
    check_close(
        f"write_kv, {str(dtype).removeprefix('torch.')} cache", flat[case.meta.slot_mapping], expected.to(dtype), 0.0
    )
    flat[case.meta.slot_mapping] = 0
    assert not bool(flat.any())


def need(**changes: Any) -> Requirements:
    plain = Requirements(
        device=torch.device("cuda"),
        capability=(9, 0),
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        head_dims=frozenset({128}),
        group_sizes=frozenset({4}),
        block_size=16,
    )
    return replace(plain, **changes)


class NoCompiler:
    @property
    def active(self) -> Any:
        raise RuntimeError("Failed to find one\nin PATH")


def test_says_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.refusal(need()) is None
    assert backend.refusal(need(windows=True, softcap=True, sinks=True, deterministic=True)) is None
    assert backend.refusal(need(kv_dtype=FP8)) is None
    for changes, words in [
        ({"capability": (7, 5)}, "capability 8.0, the device has 7.5"),
        ({"capability": (8, 0), "kv_dtype": FP8}, "capability 8.9"),
        ({"dtype": torch.float64}, "float64"),
        ({"kv_dtype": torch.int8}, "int8"),
        ({"head_dims": frozenset({64, 576})}, "576"),
        ({"head_dims": frozenset({20})}, "20"),
        ({"group_sizes": frozenset({71})}, "71"),
        ({"block_size": 24}, "24"),
    ]:
        reason = backend.refusal(need(**changes))
        assert reason is not None
        assert words in reason
    on_cpu = need(device=torch.device("cpu"), capability=None)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert backend.refusal(on_cpu) is None
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert "need a CUDA device" in str(backend.refusal(on_cpu))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(available, "_driver_problem", available._driver_problem.__wrapped__)
    monkeypatch.setattr(triton.runtime, "driver", NoCompiler())
    assert "needs a C compiler and Python's header files: Failed to find one" in str(backend.refusal(need()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "Triton is not installed" in str(backend.refusal(need()))


def test_a_scale_that_is_not_positive_is_refused() -> None:
    case = Case([1], [1])
    with pytest.raises(ValueError, match="scale must be positive"):
        backend.paged_attention(case.q, None, case.cache, case.meta, scale=0.0)


def test_a_step_without_tokens_is_no_error() -> None:
    case = Case([1], [1])
    meta = replace(
        case.meta,
        query_lens=[],
        kv_lens=[],
        slot_mapping=case.meta.slot_mapping[:0],
        block_table=case.meta.block_table[:0],
    )
    backend.write_kv(case.kv[:0], case.cache, meta)
    assert backend.paged_attention(case.q[:0], None, case.cache, meta, scale=1.0).shape == (0, 4, 16)
