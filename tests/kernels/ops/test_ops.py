"""The Triton kernels of a layer's elementwise operations against their specification in PyTorch.

On a GPU where there is one, else in Triton's interpreter. The greatest error of each kernel and dtype, as a share of
the largest number, is printed at the end of `pytest -s`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from batchjob_kernels import AttnMeta
from batchjob_kernels.attention import reference
from batchjob_kernels.ops import cpu as cpu_ops
from batchjob_kernels.ops import reference as reference_ops
from batchjob_kernels.ops import triton as triton_ops

# NumPy's, in the interpreter, of numbers that are meant to be too large.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Both sides compute in float32 and round to the output's dtype, from sums in another order: a result near the middle of
# two numbers may become either of them, one unit in the last place.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float8_e4m3fn: 2.0**-3}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _converted(values: Any, source: Any, target: Any, _: Any) -> Any:
    """Numbers of one of Triton's types as bits of another, rounded to nearest as a device does it."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}
    bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
    raw = torch.from_numpy(values.view(f"i{values.itemsize}" if values.itemsize > 1 else "u1").copy())
    converted = raw.view(dtypes[str(source)]).to(dtypes[str(target)])
    return converted.view(bits[converted.itemsize]).numpy().view(f"u{converted.itemsize}")


@pytest.fixture(autouse=True)
def _true_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts float32 off to bfloat16, and loses the carry when it rounds to FP8."""
    if DEVICE == "cpu":
        monkeypatch.setattr("triton.runtime.interpreter._convert_float", _converted)


@pytest.fixture
def check(check_close: Callable[[str, Tensor, Tensor, float], None]) -> Callable[[str, Tensor, Tensor], None]:
    def check(kernel: str, actual: Tensor, expected: Tensor) -> None:
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert actual.is_contiguous()
        if expected.numel():
            check_close(kernel, actual, expected, LIMITS[expected.dtype])

    return check


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 96, 576, 1024])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, size: int, offset: float, check: Any) -> None:
    torch.manual_seed(size)
    for num_rows, scale, weight_dtype in ((0, 1.0, dtype), (1, 1e-4, dtype), (3, 30.0, torch.float32)):
        x, weight = normal(num_rows, size, dtype=dtype, scale=scale), normal(size, dtype=weight_dtype)
        residual = normal(num_rows, size, dtype=dtype, scale=scale)
        before = x.clone(), residual.clone()
        expected = reference_ops.rms_norm(x, weight, 1e-6, offset=offset)
        check("rms_norm", triton_ops.rms_norm(x, weight, 1e-6, offset=offset), expected)
        normed, total = triton_ops.add_rms_norm(x, residual, weight, 1e-6, offset=offset)
        expected, expected_total = reference_ops.add_rms_norm(x, residual, weight, 1e-6, offset=offset)
        check("add_rms_norm", normed, expected)
        check("add_rms_norm total", total, expected_total)
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])


def test_rms_norm_is_what_pytorch_calls_it() -> None:
    x, weight = normal(5, 40), normal(40)
    expected = torch.nn.functional.rms_norm(x, (40,), weight + 1, 1e-5)
    torch.testing.assert_close(reference_ops.rms_norm(x, weight, 1e-5, offset=1.0), expected)


def test_a_row_that_is_not_finite_does_not_reach_the_others() -> None:
    x, weight = normal(3, 40), normal(40)
    expected = triton_ops.rms_norm(x, weight, 1e-5)
    x[1, 5] = torch.nan
    actual = triton_ops.rms_norm(x, weight, 1e-5)
    assert torch.equal(actual[::2], expected[::2])
    assert bool(actual[1].isnan().all())


def test_a_view_that_is_not_contiguous_is_read_as_it_is() -> None:
    x, weight = normal(40, 4).T, normal(40)
    torch.testing.assert_close(triton_ops.rms_norm(x, weight, 1e-5), reference_ops.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("size", [1, 13, 48, 1100])
def test_act_and_mul(dtype: torch.dtype, activation: str, size: int, check: Any) -> None:
    torch.manual_seed(size)
    for num_rows in (0, 1, 3):
        gate_up = normal(num_rows, 2 * size, dtype=dtype, scale=3.0)
        expected = reference_ops.act_and_mul(gate_up, activation)
        check(f"act_and_mul {activation}", triton_ops.act_and_mul(gate_up, activation), expected)


@pytest.mark.parametrize("ops", [reference_ops, triton_ops])
def test_an_unknown_activation_is_an_error(ops: Any) -> None:
    with pytest.raises(KeyError):
        ops.act_and_mul(normal(1, 4), "relu")


BLOCK_SIZE = 4
NUM_BLOCKS = 5
# Query heads, KV heads, head size, rotated dimensions.
SHAPES = [(4, 2, 16, 16), (3, 1, 40, 24), (7, 1, 64, 64), (2, 2, 80, 20), (14, 2, 12, 12)]


def layer(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A cache whose last block is the null block, all of it set to 1."""
    return torch.ones(NUM_BLOCKS + 1, 2, num_kv_heads, BLOCK_SIZE, head_dim, device=DEVICE).to(dtype)


def meta(num_tokens: int, *, num_padding: int = 0) -> AttnMeta:
    """One-token rows over random places; the last `num_padding` all write to the null block."""
    slot_mapping = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
    slot_mapping[num_tokens - num_padding :] = NUM_BLOCKS * BLOCK_SIZE
    table = torch.zeros(num_tokens, 1, dtype=torch.int32)
    lens = [1] * num_tokens
    return AttnMeta(lens, lens, table.to(DEVICE), slot_mapping.to(DEVICE), BLOCK_SIZE)


def rotations(num_tokens: int, rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.rand(num_tokens, rotary_dim // 2, device=DEVICE).mul_(6.3).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def both(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, kv_dtype: torch.dtype, where: AttnMeta, **more: Any
) -> Any:
    results = []
    for ops in (triton_ops, reference_ops):
        cache = layer(kv_heads, qkv.shape[2], kv_dtype)
        results.append((ops.rotary_write(qkv, cos, sin, cache, where, **more), cache))
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("norms", "with_fp8"), [("none", False), ("both", False), ("q", False), ("none", True), ("k", True)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary_write(dtype: torch.dtype, norms: str, with_fp8: bool, shape: tuple[int, ...], check: Any) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim = shape
    torch.manual_seed(head_dim)
    kv_dtype = torch.float8_e4m3fn if with_fp8 else dtype
    for num_tokens, offset in ((0, 0.0), (3, 1.0)):
        more: dict[str, Any] = {"num_heads": num_heads, "eps": 1e-6, "offset": offset}
        for name in ("q", "k"):
            if norms in (name, "both"):
                more[f"{name}_norm"] = normal(head_dim, dtype=dtype)
        qkv = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        cos, sin = rotations(num_tokens, rotary_dim, dtype)
        (q, cache), (expected, expected_cache) = both(qkv, cos, sin, num_kv_heads, kv_dtype, meta(num_tokens), **more)
        check("rotary_write q", q, expected)
        check("rotary_write cache", cache, expected_cache)
        if cos.shape[1]:
            half = rotary_dim // 2
            halves = both(
                qkv,
                cos[:, :half],
                sin[:, :half],
                num_kv_heads,
                kv_dtype,
                meta(num_tokens),
                rotary_dim=rotary_dim,
                **more,
            )
            assert torch.equal(halves[0][0], q), "half of the cosines is enough"
            check("rotary_write q", halves[0][0], halves[1][0])


@pytest.mark.parametrize("norms", [False, True])
def test_the_operations_of_a_cpu_are_those_of_the_reference(norms: bool) -> None:
    x, residual, weight = (torch.randn(shape) for shape in ((5, 24), (5, 24), (24,)))
    for offset in (0.0, 1.0):
        expected, total = reference_ops.add_rms_norm(x, residual, weight, 1e-6, offset=offset)
        torch.testing.assert_close(cpu_ops.rms_norm(total, weight, 1e-6, offset=offset), expected)
        torch.testing.assert_close(cpu_ops.add_rms_norm(x, residual, weight, 1e-6, offset=offset), (expected, total))
    for activation in reference_ops.ACTIVATIONS:
        expected = reference_ops.act_and_mul(x, activation)
        torch.testing.assert_close(cpu_ops.act_and_mul(x, activation), expected)
    qkv, (cos, sin) = torch.randn(5, 8, 16), (part.cpu() for part in rotations(5, 16, torch.float32))
    where = replace(meta(5), slot_mapping=meta(5).slot_mapping.cpu())
    order = cpu_ops.head_order(16)
    more: dict[str, Any] = {"num_heads": 4}
    if norms:
        more |= {"q_norm": torch.randn(16), "k_norm": torch.randn(16), "eps": 1e-6, "offset": 1.0}
    caches = [layer(2, 16, torch.float32).cpu() for _ in range(2)]
    expected = reference_ops.rotary_write(qkv, cos, sin, caches[0], where, **more)
    reordered = qkv.clone()
    reordered[:, :6] = qkv[:, :6][..., order]
    if norms:
        more |= {name: more[name][order] for name in ("q_norm", "k_norm")}
    actual = cpu_ops.rotary_write(reordered, cos, sin, caches[1], where, **more)
    torch.testing.assert_close(actual, expected[..., order])
    torch.testing.assert_close(caches[1][:, 0], caches[0][:, 0][..., order])
    torch.testing.assert_close(caches[1][:, 1], caches[0][:, 1])
    with pytest.raises(ValueError, match="whole heads"):
        cpu_ops.rotary_write(qkv, cos, sin, caches[1], where, num_heads=4, rotary_dim=8)


def test_the_rotation_and_the_write_are_those_of_transformers_and_of_write_kv() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    qkv = normal(3, 8, 16)
    cos, sin = rotations(3, 16, torch.float32)
    q, k, v = qkv.split((4, 2, 2), dim=1)
    rotated_q, rotated_k = apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None], unsqueeze_dim=2)
    where, cache, expected = meta(3), layer(2, 16, torch.float32), layer(2, 16, torch.float32)
    reference.write_kv(torch.stack((rotated_k[0], v), dim=1), expected, where)
    actual = reference_ops.rotary_write(qkv, cos, sin, cache, where, num_heads=4)
    torch.testing.assert_close(actual, rotated_q[0])
    torch.testing.assert_close(cache, expected)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("ops", [reference_ops, triton_ops])
def test_what_is_not_finite_is_stored_as_zero_and_fp8_is_clamped(ops: Any, kv_dtype: torch.dtype) -> None:
    dtype = torch.float32 if kv_dtype == torch.float8_e4m3fn else kv_dtype
    qkv = normal(2, 6, 16, dtype=dtype)
    for number, (head, dim) in itertools.product((torch.nan, torch.inf, -torch.inf), ((2, 3), (4, 7), (5, 15))):
        qkv[0, head, dim] = number
        cache, where = layer(2, 16, kv_dtype), meta(2)
        ops.rotary_write(qkv, *rotations(2, 16, dtype), cache, where, num_heads=2)
        flat = cache.float().permute(0, 3, 1, 2, 4).flatten(0, 1)[where.slot_mapping]  # [n, 2, kv_heads, head_dim]
        assert bool(flat.isfinite().all())
        if head == 2:
            assert float(flat[0, 0, 0, dim]) == float(flat[0, 0, 0, dim + 8]) == 0.0, "both of the rotated pair"
        else:
            assert float(flat[0, 1, head - 4, dim]) == 0.0
            assert float(flat[0, 1, head - 4, dim - 1]) == float(qkv[0, head, dim - 1].to(kv_dtype)), "only that one"
    if kv_dtype == torch.float8_e4m3fn:
        qkv = torch.full((1, 3, 16), 1000.0, device=DEVICE)
        cache, where = layer(1, 16, kv_dtype), meta(1)
        ones = torch.ones(1, 16, device=DEVICE)
        ops.rotary_write(qkv, ones, 0 * ones, cache, where, num_heads=1)
        assert sorted(set(cache.float().flatten().tolist())) == [1.0, 448.0]


@pytest.mark.parametrize("ops", [reference_ops, triton_ops])
def test_padding_rows_write_to_the_null_block_only(ops: Any) -> None:
    qkv = normal(6, 6, 16)
    where = meta(6, num_padding=4)
    cache = layer(2, 16, torch.float32)
    ops.rotary_write(qkv, *rotations(6, 16, torch.float32), cache, where, num_heads=2)
    written = (cache != 1).any(dim=4).all(dim=2).all(dim=1).flatten().nonzero().flatten()
    assert written.tolist() == sorted({*where.slot_mapping.tolist()})
    assert int(where.slot_mapping.max()) == NUM_BLOCKS * BLOCK_SIZE
    assert bool((cache[-1, :, :, 1:] == 1).all())
    assert bool(cache.isfinite().all())
