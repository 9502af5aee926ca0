"""Deterministic mode: the same bits alone and among others, in every cut, after preemption, within any limits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from families import FAMILIES, WINDOW, build, save
from torch import Tensor, nn

from batchjob.core.blocks import BlockPool
from batchjob.core.scheduler import Scheduler
from batchjob.core.step_plan import StepPlan
from batchjob.engine.config import EngineConfig
from batchjob.engine.invariant.forward import ROWS, InvariantForward
from batchjob.engine.invariant.parts import invariant_experts, repeatable
from batchjob.engine.kv_cache import KVCache
from batchjob.engine.model.attention_hook import ATTENTION_NAME, StepContext, register
from batchjob.engine.model.load import LoadedModel, load_model, prepare_model
from batchjob.engine.runner import TorchRunner
from batchjob.errors import UnsupportedModelError
from batchjob.records import Request
from batchjob.sampling import SamplingParams
from batchjob_kernels import AttnMeta, DeviceLens
from batchjob_kernels.attention import gather, invariant
from batchjob_kernels.attention.select import Selection

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_OUTPUT = 9
MAX_LEN = 160
Forward = Callable[[Tensor, Tensor, Tensor, StepContext], Tensor]
Part = tuple[int, int, int]  # sequence, first position, last position + 1


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(model: Any, backend: ModuleType = invariant, *, use_fused: bool = True) -> LoadedModel:
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    loaded = prepare_model(
        model,
        max_model_len=MAX_LEN,
        choose_backend=lambda _: Selection("invariant", backend, "asked for"),
        block_size=16,
        use_fused=use_fused,
    )
    assert loaded is not None
    return loaded


@cache
def invariant_forward(family: str, dtype: str) -> tuple[LoadedModel, Forward]:
    model = load(build(*FAMILIES[family]).to(DTYPES[dtype]))
    return model, InvariantForward(model, invariant).forward


def prompts(lengths: tuple[int, ...] = (15, 1, 6, 70, 12, 140), vocab_size: int = 96) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [*rows, rows[-3][:50] + rows[0]] if len(rows) > 3 else rows  # one that shares blocks with another


def same(actual: Tensor, expected: Tensor) -> bool:
    """Bit by bit: tells 0 from -0."""
    kind = torch.int32 if actual.dtype == torch.float32 else torch.int16
    return torch.equal(actual.view(kind), expected.view(kind))


class Steps:
    """Runs steps of some sequences over a cache of its own; block tables are random."""

    def __init__(
        self,
        model: LoadedModel,
        forward: Forward,
        rows: list[list[int]],
        *,
        backend: ModuleType = invariant,
        block_size: int = 4,
        seed: int = 0,
    ) -> None:
        self.forward, self.rows, self.backend, self.block_size = forward, rows, backend, block_size
        width = max(-(-(len(row) + NUM_OUTPUT) // block_size) for row in rows)
        dtype = next(model.module.parameters()).dtype
        self.cache = KVCache(
            model.shapes, num_blocks=width * len(rows), block_size=block_size, dtype=dtype, device=torch.device("cpu")
        )
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randperm(width * len(rows), generator=generator).view(-1, width)

    def step(self, parts: list[Part]) -> list[Tensor]:
        """Logits of all rows of each part."""
        tables = [self.table[row].tolist() for row, _, _ in parts]
        return run_step(
            self, [(self.rows[row], *part, table) for (row, *part), table in zip(parts, tables, strict=True)]
        )

    def whole(self, row: int) -> Tensor:
        return self.step([(row, 0, len(self.rows[row]))])[0]


def run_step(on: Any, parts: list[tuple[list[int], int, int, list[int]]], *, device_lens: bool = False) -> list[Tensor]:
    """A step of (tokens, start, stop, blocks) with the forward, cache and backend of `on`."""
    size, null = on.block_size, on.cache.null_block
    width = max(len(blocks) for *_, blocks in parts)
    query_lens = [stop - start for _, start, stop, _ in parts]
    meta = AttnMeta(
        query_lens=query_lens,
        kv_lens=[stop for _, _, stop, _ in parts],
        block_table=torch.tensor([blocks + [null] * (width - len(blocks)) for *_, blocks in parts]),
        slot_mapping=torch.tensor(
            [blocks[at // size] * size + at % size for _, start, stop, blocks in parts for at in range(start, stop)]
        ),
        block_size=size,
    )
    if device_lens:  # the table of all slots, in another order, and no lengths on the host
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        rows = torch.arange(len(parts)).flip(0)
        lens = DeviceLens(starts.int(), torch.tensor(meta.kv_lens).int(), rows.int())
        meta.block_table, meta.kv_lens = meta.block_table.flip(0).int(), [1] * len(parts)
        meta.device_lens = lens
    ids = torch.tensor([token for tokens, start, stop, _ in parts for token in tokens[start:stop]])
    positions = torch.tensor([at for _, start, stop, _ in parts for at in range(start, stop)])
    logits = on.forward(ids, positions, torch.arange(len(ids)), StepContext(meta, on.cache, on.backend))
    return list(logits.split(query_lens))


_ALWAYS = {
    ("llama", "float32"),
    ("llama", "bfloat16"),
    ("qwen3", "bfloat16"),
    ("gemma2", "float32"),
    ("gpt_oss", "float32"),
    ("gpt_oss", "bfloat16"),
    ("qwen3_moe", "float32"),
    ("qwen3_moe", "bfloat16"),
}


def models(always: set[tuple[str, str]]) -> Any:
    """All families and dtypes, those that are not `always` run marked long."""
    return pytest.mark.parametrize(
        ("family", "dtype"),
        [
            pytest.param(family, dtype, marks=[] if (family, dtype) in always else pytest.mark.long)
            for family in FAMILIES
            for dtype in DTYPES
        ],
    )


@models(_ALWAYS)
def test_prefill_and_decode_agree_at_every_chunk_boundary(family: str, dtype: str) -> None:
    model, forward = invariant_forward(family, dtype)
    length = 2 * WINDOW - 1
    rows = prompts((length,))
    whole = Steps(model, forward, rows).whole(0)
    steps = Steps(model, forward, rows, seed=1)
    assert same(torch.cat([steps.step([(0, at, at + 1)])[0] for at in range(length)]), whole)
    for cut in range(1, length):
        steps = Steps(model, forward, rows, seed=cut, block_size=cut)
        assert same(torch.cat([steps.step([(0, a, b)])[0] for a, b in ((0, cut), (cut, length))]), whole)


@models(_ALWAYS)
def test_a_long_prompt_agrees_across_blocks_of_rows_and_chunks_of_keys(family: str, dtype: str) -> None:
    model, forward = invariant_forward(family, dtype)
    rows = prompts((140,))
    whole = Steps(model, forward, rows).whole(0)
    for cut in (ROWS - 1, ROWS, ROWS + 1, 127, 128, 129):
        steps = Steps(model, forward, rows, seed=cut)
        parts = [steps.step([(0, a, b)])[0] for a, b in ((0, cut), (cut, 140))]
        assert same(torch.cat(parts), whole)
    steps.step([(0, 0, 124)])
    assert same(torch.cat([steps.step([(0, at, at + 1)])[0] for at in range(124, 132)]), whole[124:132])


@models(_ALWAYS)
def test_what_else_is_in_a_step_and_in_which_order_changes_no_bit(family: str, dtype: str) -> None:
    model, forward = invariant_forward(family, dtype)
    rows = prompts()
    expected = [Steps(model, forward, [row]).whole(0) for row in rows]
    rng = random.Random(family)
    for seed in range(2):
        steps = Steps(model, forward, rows, block_size=rng.choice([1, 4, 16]), seed=seed)
        done = [0] * len(rows)
        outs: list[list[Tensor]] = [[] for _ in rows]
        while pending := [index for index, row in enumerate(rows) if done[index] < len(row)]:
            chosen = rng.sample(pending, rng.randint(1, len(pending)))
            parts = [(at, done[at], min(len(rows[at]), done[at] + rng.choice([1, 13, 80]))) for at in chosen]
            for (index, _, stop), out in zip(parts, steps.step(parts), strict=True):
                outs[index].append(out)
                done[index] = stop
        assert all(same(torch.cat(out), whole) for out, whole in zip(outs, expected, strict=True))


@dataclass
class Recorder:
    """Runs all prompts through a scheduler, greedily; keeps the logits of every position of every row."""

    model: LoadedModel
    forward: Forward
    block_size: int = 4
    num_blocks: int = 400
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    prefix_caching: bool = True
    backend: ModuleType = invariant
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_preemptions: int = 0

    def run(self) -> Recorder:
        device, dtype = torch.device("cpu"), next(self.model.module.parameters()).dtype
        self.cache = KVCache(
            self.model.shapes, num_blocks=self.num_blocks, block_size=self.block_size, dtype=dtype, device=device
        )
        scheduler = Scheduler(
            BlockPool(self.num_blocks, self.block_size),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=MAX_LEN,
            prefix_caching=self.prefix_caching,
        )
        for row, prompt in enumerate(prompts()):
            params = SamplingParams(max_tokens=NUM_OUTPUT)
            assert scheduler.add(Request(row, 0, prompt, params, stream=row)) is None
        while (plan := scheduler.schedule()) is not None:
            scheduler.commit(plan, self._execute(plan))
            for seq in [piece.seq for piece in plan.sampled]:
                if len(seq.tokens) == seq.max_len:
                    self.tokens[seq.request.row_index] = seq.output_token_ids
                    scheduler.finish(seq)
        self.num_preemptions = scheduler.num_preemptions
        return self

    def _execute(self, plan: StepPlan) -> list[int]:
        parts = [(piece.seq.tokens, piece.start, piece.stop, piece.seq.blocks) for piece in plan.slices]
        outs = run_step(self, parts)
        for piece, out in zip(plan.slices, outs, strict=True):
            for position, logits in zip(range(piece.start, piece.stop), out, strict=True):
                key = piece.seq.request.row_index, position
                # Computed again after a preemption: the same bits as the first time.
                assert key not in self.logits or same(self.logits[key], logits) or self.backend is not invariant
                self.logits[key] = logits
        return [int(outs[at][-1].argmax()) for at in plan.sampled_at]

    def agrees(self, other: Recorder) -> bool:
        common = self.logits.keys() & other.logits.keys()
        return self.tokens == other.tokens and all(same(self.logits[key], other.logits[key]) for key in common)


LIMITS: list[dict[str, Any]] = [
    {"max_num_seqs": 2, "max_num_batched_tokens": 17},
    {"max_num_seqs": 7, "max_num_batched_tokens": 300, "block_size": 16},
    {"max_num_seqs": 7, "max_num_batched_tokens": 33, "num_blocks": 10, "block_size": 16, "prefix_caching": False},
]


@models({("llama", "float32"), ("gpt_oss", "bfloat16"), ("qwen3_moe", "float32")})
def test_batch_limits_and_preemption_change_no_bit(family: str, dtype: str) -> None:
    model, forward = invariant_forward(family, dtype)
    first, *others = [Recorder(model, forward, **limits).run() for limits in LIMITS]
    assert others[-1].num_preemptions > 0
    assert len(others[-1].logits) == sum(len(row) + NUM_OUTPUT - 1 for row in prompts())
    assert all(first.agrees(other) for other in others)


@pytest.mark.parametrize(
    ("backend", "use_fused"), [(gather, True), (invariant, False)], ids=["all of it", "rows alone"]
)
def test_without_the_mode_bits_do_differ(backend: ModuleType, use_fused: bool) -> None:
    """Otherwise the tests above would show nothing. The invariant backend alone is not enough either."""
    model = load(build(*FAMILIES["llama"]), backend, use_fused=use_fused)
    rows = prompts((15,))
    whole = Steps(model, model.forward, rows, backend=backend).whole(0)
    steps = Steps(model, model.forward, rows, backend=backend)
    decoded = torch.cat([steps.step([(0, at, at + 1)])[0] for at in range(15)])
    torch.testing.assert_close(decoded, whole, atol=1e-4, rtol=1e-4)
    assert not same(decoded, whole)


def test_logits_are_those_of_the_rows_to_keep_in_their_order() -> None:
    model, forward = invariant_forward("llama", "float32")
    rows = prompts()
    steps = Steps(model, forward, rows)
    parts = [(row, 0, len(rows[row])) for row in (3, 0, 5)]
    logits = torch.cat(steps.step(parts))
    keep = torch.tensor([200, 3, 69, 84, 3])

    def forward_some(ids: Tensor, positions: Tensor, _: Tensor, step: StepContext) -> Tensor:
        out = forward(ids, positions, keep[:number], step)
        return torch.nn.functional.pad(out, (0, 0, 0, len(ids) - len(out)))

    steps.forward = forward_some
    for number in (5, 1, 0):
        some = torch.cat(steps.step(parts))[:number]
        assert same(some, logits[keep[:number]])


def test_lengths_on_the_device_are_understood() -> None:
    model, forward = invariant_forward("llama", "float32")
    steps = Steps(model, forward, prompts())
    parts = [(steps.rows[row], 0, len(steps.rows[row]), steps.table[row].tolist()) for row in (3, 0, 5)]
    expected = torch.cat(run_step(steps, parts))
    assert same(torch.cat(run_step(steps, parts, device_lens=True)), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_equal_transformers_own(family: str) -> None:
    model = build(*FAMILIES[family])
    experts = next(part for part in model.modules() if type(part).__name__.endswith("Experts"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 32, generator=generator)
    weights, index = torch.rand(50, 4, generator=generator).topk(2)
    with torch.inference_mode():
        expected = experts(x, index, weights)
        torch.testing.assert_close(invariant_experts(experts, x, index, weights), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_threads", [2, pytest.param(3, marks=pytest.mark.long)])
def test_threads_change_nothing_about_it(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    model = load(build(*FAMILIES["llama"]), use_fused=False)
    forward = InvariantForward(model, invariant).forward
    rows = prompts((5,))
    whole = Steps(model, forward, rows).whole(0)
    steps = Steps(model, forward, rows)
    assert same(torch.cat([steps.step([(0, at, at + 1)])[0] for at in range(5)]), whole)
    assert torch.get_num_threads() == num_threads


def test_a_part_that_follows_a_rows_place_is_refused() -> None:
    model = load(build(*FAMILIES["llama"]))
    norm = model.module.model.norm  # type: ignore[union-attr]

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return type(self).forward(self, x) + 1e-6 * torch.arange(x.shape[1])[:, None] / x.shape[1]

    norm.forward = MethodType(forward, norm)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM on cpu with 1 threads .* row's place"):
        InvariantForward(model, invariant)


def test_an_attention_that_follows_the_step_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="depend on a row's neighbours"):
        InvariantForward(load(build(*FAMILIES["llama"]), gather), gather)


def test_products_that_change_their_size_are_refused() -> None:
    model = load(build(*FAMILIES["llama"]), use_fused=False)
    mlp = model.module.model.layers[1].mlp  # type: ignore[union-attr, index]

    def forward(self: Any, x: Tensor) -> Tensor:  # as experts in a list of linear layers do
        rows = x[0, :, 0] > 0
        out = torch.empty_like(x)
        for chosen in (rows, ~rows):
            out[0, chosen] = type(self).forward(self, x[0, chosen])
        return out

    mlp.forward = MethodType(forward, mlp)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.gate_proj gets \d+ rows and had \d+ before"):
        InvariantForward(model, invariant)


def test_experts_of_an_unknown_form_are_refused() -> None:
    model = load(build(*FAMILIES["llama"]), use_fused=False)
    model.module.model.layers[0].mlp.weights = nn.Parameter(torch.zeros(2, 3, 4))  # type: ignore[union-attr, index]
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp .*experts interface"):
        InvariantForward(model, invariant)


def test_an_operation_without_a_fixed_order_is_refused() -> None:
    model = load(build(*FAMILIES["llama"]))
    norm = model.module.model.norm  # type: ignore[union-attr]

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("put_ does not have a deterministic implementation")
        return type(self).forward(self, x)

    norm.forward = MethodType(forward, norm)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModelError, match="cannot run with --deterministic: put_ does not have"):
        InvariantForward(model, invariant)
    with repeatable():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def run_rows(path: Path, **settings: Any) -> list[list[int]]:
    """Sampled tokens of all prompts from a runner of its own."""
    config = EngineConfig(max_model_len=MAX_LEN, kv_cache_bytes=1 << 20, deterministic=True, **settings)
    runner = TorchRunner(path, config)
    capacity = runner.capacity()
    scheduler = Scheduler(
        BlockPool(capacity.num_blocks, capacity.block_size),
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=MAX_LEN,
    )
    for row, prompt in enumerate(prompts()):
        params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=1.5, top_p=0.95)
        assert scheduler.add(Request(row, 0, prompt, params, stream=row)) is None
    outputs: dict[int, list[int]] = {}
    while (plan := scheduler.schedule()) is not None:
        for tokens in runner.execute(plan).result().tokens:
            scheduler.commit(plan, tokens)  # type: ignore[arg-type]
        for seq in [piece.seq for piece in plan.sampled]:
            if len(seq.tokens) == seq.max_len:
                outputs[seq.request.row_index] = seq.output_token_ids
                scheduler.finish(seq)
    runner.close()
    return [outputs[row] for row in range(len(outputs))]


def test_a_runner_samples_the_same_tokens_within_any_limits(tmp_path: Path) -> None:
    path = save(tmp_path / "qwen3", *FAMILIES["qwen3"])
    expected = run_rows(path, max_num_seqs=7, max_num_batched_tokens=300)
    assert run_rows(path, max_num_seqs=2, max_num_batched_tokens=5, block_size=4) == expected
    assert len({token for row in expected for token in row}) > 10


@pytest.mark.real_model
def test_a_real_model_gives_the_same_bits(smollm2: Path) -> None:
    model = load_model(
        smollm2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=MAX_LEN,
        choose_backend=lambda _: Selection("invariant", invariant, "asked for"),
        block_size=16,
    )
    rows = prompts((20, 17, 9), vocab_size=model.vocab_size)
    ordinary = Steps(model, model.forward, rows, backend=gather)
    whole = ordinary.whole(0)
    decoded = ordinary.step([(0, 19, 20)])[0]
    torch.testing.assert_close(decoded[0], whole[-1], atol=1e-3, rtol=1e-3)
    assert not same(decoded[0], whole[-1]), "without the mode, bits do differ"
    forward = InvariantForward(model, invariant).forward
    whole = Steps(model, forward, rows).whole(0)
    steps = Steps(model, forward, rows, block_size=16)
    parts = [steps.step([(1, 0, 17), (0, 0, 18), (2, 0, 7)])[1]]
    parts += [steps.step([(0, at, at + 1), (2, at - 11, at - 10)])[0] for at in (18, 19)]
    assert same(torch.cat(parts), whole)
