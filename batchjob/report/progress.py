"""`Progress`: the picture of a running job, a bar on a terminal, else a plain line per interval."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

LINE_INTERVAL = 10.0  # seconds between two plain lines
BAR_INTERVAL = 0.2  # seconds between two refreshes of the bar


@dataclass(slots=True)
class ProgressCounts:
    """Running totals of one process. Rows count as done whether they ended well or as an error."""

    rows_total: int = 0
    rows_done: int = 0  # includes rows found done at start
    rows_failed: int = 0
    output_tokens: int = 0  # of this process
    prompt_tokens: int = 0  # of this process
    num_running: int = 0
    num_waiting: int = 0


class Progress:
    """Shows `ProgressCounts`. `update` may be called at every step: it returns at once until its interval is over."""

    def __init__(
        self, counts: ProgressCounts, *, mode: str, echo: Callable[[str], None], stream: TextIO | None = None
    ) -> None:
        """mode: "auto", "bar", "lines" or "none". `echo` writes one plain line."""
        out = stream or sys.stderr
        self._counts = counts
        self._echo = echo
        self._started = self._shown = time.monotonic()
        self._rows_at_start = counts.rows_done
        self._mode = ("bar" if out.isatty() else "lines") if mode == "auto" else mode
        self._bar: Any = None
        if self._mode == "bar":
            from tqdm import tqdm

            self._bar = tqdm(
                total=counts.rows_total,
                initial=counts.rows_done,
                unit="row",
                file=out,
                dynamic_ncols=True,
                mininterval=BAR_INTERVAL,
                smoothing=0.05,
                desc="rows",
            )

    def update(self) -> None:
        interval = BAR_INTERVAL if self._mode == "bar" else LINE_INTERVAL
        now = time.monotonic()
        if self._mode == "none" or now - self._shown < interval:
            return
        self._shown = now
        if self._bar is not None:
            self._show()
        else:
            self._echo(self._line())

    def clear(self) -> None:
        """Takes the bar off the terminal's last line, until the next update."""
        if self._bar is not None:
            try:
                self._bar.clear()
            except (OSError, ValueError):
                self._mode = "none"

    def _show(self) -> None:
        self._bar.set_postfix_str(self._speed(), refresh=False)
        self._bar.total = self._counts.rows_total
        try:
            self._bar.update(self._counts.rows_done - self._bar.n)
        except (OSError, ValueError):  # the terminal is gone; the job goes on without it
            self._mode = "none"

    def reused(self, num_rows: int) -> None:
        """Rows that turned out to be done already: they count as done, not as speed."""
        self._rows_at_start += num_rows
        if self._bar is not None:
            self._bar.initial += num_rows
            self._bar.n += num_rows

    def close(self) -> None:
        if self._bar is not None:
            self._show()
            try:
                self._bar.close()
            except (OSError, ValueError):
                pass
            self._bar = None
            self._mode = "none"

    def _speed(self) -> str:
        counts = self._counts
        seconds = max(time.monotonic() - self._started, 1e-9)
        failed = f", {counts.rows_failed:,} failed" if counts.rows_failed else ""
        return f"{counts.output_tokens / seconds:,.0f} output tok/s{failed}"

    def _line(self) -> str:
        counts = self._counts
        share = counts.rows_done / counts.rows_total if counts.rows_total else 1.0
        done_here = counts.rows_done - self._rows_at_start
        seconds = time.monotonic() - self._started
        eta = duration(seconds / done_here * (counts.rows_total - counts.rows_done)) if done_here else "unknown"
        return (
            f"{time.strftime('%H:%M:%S')} rows {counts.rows_done:,}/{counts.rows_total:,} ({share:.1%}), "
            f"{self._speed()}, running {counts.num_running}, waiting {counts.num_waiting}, ETA {eta}"
        )


def duration(seconds: float) -> str:
    """Seconds as people write them: 8.4s, 3m12s, 2h05m."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, secs = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{secs:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def counted(number: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def printable(text: str, limit: int | None = 400) -> str:
    """Text of a row made safe for a terminal: control characters escaped (newlines kept as \\n), length capped."""
    safe = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:limit])
    return safe + (f"... ({len(text):,} characters)" if limit is not None and len(text) > limit else "")
