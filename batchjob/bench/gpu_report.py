"""Prints the results of `gpu_check` in a few lines per part. The JSON file has all of it.

`python -m batchjob.bench.gpu_report FILE` prints the table of a file, also of one whose run was cut off.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_VERSIONS = ("python", "cuda", "torch", "triton", "transformers")


def table(document: dict[str, Any]) -> str:
    """A short table of everything, last of all."""
    parts: dict[str, dict[str, Any]] = document["parts"]
    smoke = parts.get("smoke", {})
    lines = []
    if "device" in smoke:
        device, versions = smoke["device"], smoke.get("versions", {})
        shown = ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if name in versions)
        missing = [name for name, version in versions.items() if version == "missing"]
        lines.append(f"{device['name']}; {shown}" + (f"; missing: {', '.join(missing)}" if missing else ""))
    if "limits" in smoke:
        limits = smoke["limits"]
        lines.append(
            f"measured limits: copy {limits['bytes_per_second'] / 1e12:.3f} TB/s, "
            f"{limits['dtype']} matrix product {limits['flops'] / 1e12:.1f} TFLOP/s"
        )
    if document.get("tiny"):
        lines.append("tiny models: a rehearsal; the figures mean nothing")
    rows = [("part", "seconds", "output tok/s", "of bound", "")]
    for name, entry in parts.items():
        rows += [(name if index == 0 else "", *row) for index, row in enumerate(_rows(entry))]
    rows += _ratios(parts)
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in (1, 2, 3)), row[4]]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def headline(name: str, entry: dict[str, Any]) -> str:
    """One line as soon as a part is over."""
    row = _rows(entry)[0]
    rate, share, remark = row[1] and f"{row[1]} tok/s", row[2] and f"{row[2]} of its bound", row[3]
    return "  ".join(filter(None, (f"{entry.get('seconds', 0.0):6.1f} s", name, entry["status"], rate, share, remark)))


Row = tuple[str, str, str, str]


def _rows(entry: dict[str, Any]) -> list[Row]:
    """(seconds, tokens per second, share of the bound, remarks), the first for the part as a whole."""
    rows: list[Row] = [
        (
            _rate(value["seconds"], 1),
            _rate(value["output_tok_s"]),
            _share(value.get("fraction_of_bound")),
            _remark(name, value),
        )
        for name, value in entry.items()
        if isinstance(value, dict) and "output_tok_s" in value
    ]
    more = _facts(entry)
    if entry["status"] != "ok":
        reason = (
            entry.get("reason")
            or entry.get("error")
            or "; ".join(f"{name}: {error}" for name, error in entry.get("errors", {}).items())
        )
        more.insert(0, f"{entry['status']}: {reason}"[:300])
    if not rows:
        rows.append((_rate(entry.get("seconds"), 1), "", "", more.pop(0) if more else entry["status"]))
    return rows + [("", "", "", fact) for fact in more]


def _remark(name: str, value: dict[str, Any]) -> str:
    bound = value.get("bound_output_tok_s")
    parts = [name, None if bound is None else f"bound {bound:,.0f} tok/s", value.get("note")]
    return ", ".join(part for part in parts if part)


def _facts(entry: dict[str, Any]) -> list[str]:
    facts = []
    checks = [name for name, value in entry.items() if name.startswith("kernel ") and isinstance(value, str)]
    if checks:
        refused = sum(entry[name].startswith("refused") for name in checks)
        facts.append(
            f"{len(checks) - refused} kernel checks passed, {refused} refused; engine: {entry.get('engine', 'failed')}"
        )
    if "start" in entry:
        start = entry["start"]
        graphs = entry.get("graphs", {})
        facts.append(
            f"{start.get('backend')}, fused {_plain(start.get('fused')) or 'nothing'}, load {start['seconds']:.1f} s, "
            f"warm-up {entry.get('warm_up_seconds', 0):.1f} s, {graphs.get('captured', 0)} graphs"
            + (f" (refused: {graphs['refused']})" if graphs.get("refused") else "")
        )
    if "profile" in entry:
        profile = entry["profile"]
        kernels = ", ".join(f"{kind} {value:,.0f}" for kind, value in profile["kernels_us"].items())
        bound = f", bound {profile['bound_us']:,.0f}" if "bound_us" in profile else ""
        facts.append(f"decode step of {profile['sequences']} rows, us: {profile['step_us']:,.0f}{bound} = "
                     f"{kernels}, gaps {profile['gaps_us']:,.0f}")  # fmt: skip
    for name, value in entry.items():
        if (
            isinstance(value, dict)
            and value
            and any(isinstance(inner, dict) and "us" in inner for inner in value.values())
        ):
            facts += [f"{name}, {label}: {_kernel(inner)}" for label, inner in value.items()]
        elif isinstance(value, dict) and "us" in value:
            facts.append(f"{name}: {_kernel(value)}")
        elif isinstance(value, dict) and "steady" in value:
            facts.append(f"{name}: " + ", ".join(f"{point} {seconds:.1f} s" for point, seconds in value.items()))
        elif isinstance(value, str) and value.startswith("refused") and not name.startswith("kernel "):
            facts.append(f"{name}: {value}")
    if "attention" in entry:
        facts.append(f"attention by {entry['attention']}, {_plain(entry.get('settings')) or 'its own settings'}")
    if "tests" in entry:
        facts.append(f"of {entry['collected']} tests " + _plain(entry["tests"]))
    if "rows_when_killed" in entry:
        facts.append(f"killed after {entry['rows_when_killed']} rows; {entry.get('rows', '?')} rows once after it"
                     if not entry.get("not_once") else "rows were lost or doubled")  # fmt: skip
    return facts


def _kernel(value: dict[str, Any] | str) -> str:
    if isinstance(value, str):  # why it failed
        return value
    parts = [f"{value['us']:,.1f} us"]
    parts += [f"{value[key]:,.0f} {unit}" for key, unit in (("kv_gb_s", "GB/s"), ("gb_s", "GB/s")) if key in value]
    if "tflop_s" in value:
        parts.append(f"{value['tflop_s']:,.1f} TFLOP/s")
    parts += [
        f"{value[key]:.0%} of {what}" for key, what in (("of_copy", "copy"), ("of_product", "product")) if key in value
    ]
    return ", ".join(parts)


def _ratios(parts: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    """The speed-up over Transformers' own ways."""
    rows = []
    for name, entry in parts.items():
        kind, _, shape = name.partition("/")
        ours = parts.get(f"best/{shape}", {}).get("published", {}).get("output_tok_s")
        theirs = entry.get("published", {}).get("output_tok_s")
        if kind in ("generate_batch", "generate") and ours and theirs:
            rows.append((f"best to {name}", "", f"{ours / theirs:.2f} x", "", ""))
    return rows


def _rate(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(
            f"{name}={inner:.3g}" if isinstance(inner, float) else f"{name}={inner}" for name, inner in value.items()
        )
    return "" if value is None else str(value)


def main(arguments: list[str] | None = None) -> None:
    (name,) = sys.argv[1:] if arguments is None else arguments
    print(table(json.loads(Path(name).read_text())))


if __name__ == "__main__":
    main()
