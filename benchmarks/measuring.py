"""Repeated timing, rows of a result table, and what machine the numbers are from."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One way to do the work of a part. ``seconds`` holds one entry per repeat."""

    name: str
    seconds: tuple[float, ...]
    tokens: int = 0
    """Tokens that went through the model, padding included; 0 where they are not counted."""
    facts: dict[str, float] = field(default_factory=dict)
    """What else was measured, by name and unit."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "median_s": self.median,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "repeats": len(self.seconds),
            "tokens": self.tokens,
            **self.facts,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """Whether two ways gave the same result. ``value`` must not exceed ``bound``."""

    name: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        # Written so that NaN fails.
        return self.value <= self.bound


@dataclass(frozen=True, slots=True)
class Part:
    """One comparison; the first row is the baseline that ratios refer to."""

    title: str
    work: str
    rows: tuple[Row, ...]
    checks: tuple[Check, ...] = ()
    shares: dict[str, float] = field(default_factory=dict)

    def ratio(self, row: Row) -> float:
        """How many times faster than the baseline."""
        return self.rows[0].median / row.median

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "work": self.work,
            "rows": [row.as_dict() | {"speedup": self.ratio(row)} for row in self.rows],
            "checks": [asdict(check) | {"ok": check.ok} for check in self.checks],
            "shares": self.shares,
        }

    def as_text(self) -> str:
        lines = [f"{self.title}: {self.work}"]
        width = max(map(len, (*(row.name for row in self.rows), *self.shares)))
        for row in self.rows:
            tokens = f"{row.tokens:>9,} tokens" if row.tokens else " " * 16
            facts = "".join(f"  {_short(value)} {name}" for name, value in row.facts.items())
            lines.append(
                f"  {row.name:<{width}} {row.median:8.3f} s  ({min(row.seconds):.3f} .. "
                f"{max(row.seconds):.3f})  {tokens}  {self.ratio(row):5.2f} x{facts}"
            )
        for name, share in self.shares.items():
            lines.append(f"  {name:<{width}} {100 * share:7.1f} %")
        for check in self.checks:
            verdict = "ok" if check.ok else "DIFFERENT"
            lines.append(f"  {check.name}: {check.value:.3g} (bound {check.bound:g}) {verdict}")
        return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def interleaved(ways: Sequence[tuple[str, Callable[[], T]]], repeats: int) -> list[tuple[T, Row]]:
    """Time several ways in turn, so that a change of the machine's load meets all of them.

    Each way is warmed up once; its result of the last repeat is returned with its row.
    """
    results: dict[str, T] = {name: call() for name, call in ways}
    seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
    for repeat in range(repeats):
        for name, call in ways:
            say(f"  {name}: repeat {repeat + 1} of {repeats}")
            began = time.perf_counter()
            results[name] = call()
            seconds[name].append(time.perf_counter() - began)
    return [(results[name], Row(name, tuple(seconds[name]))) for name, _ in ways]


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def hardware() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()
