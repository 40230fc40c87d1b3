"""Win rates counted anew from stored games: the numbers of ``docs/results.md``.

A folder holds one sub-folder per method and, in ``start/``, the games of the policy that all of
them began with::

    start/seed1-train.jsonl.gz  start/seed1-val.jsonl.gz  delta_belief/seed1-train.jsonl.gz ...

``train`` and ``val`` name the sampling (temperature 1, and the settings of validation). Intervals
are 95 % by bootstrap over secrets; the games of all seeds of a secret stay together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from delta_belief_rl.eval.statistics import Interval, cluster_bootstrap, paired_difference
from delta_belief_rl.rollout.store import read_rows
from delta_belief_rl.types import UserError

START = "start"
_FILE = re.compile(r"seed(\d+)-(train|val)\.jsonl\.gz$")

Counts = dict[str, tuple[float, int]]
"""Secret to (strict wins, games)."""


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method under one sampling.

    Attributes:
        seeds: Strict win rate of each seed.
        rate: Over all games of all seeds.
        gain: Rate minus that of the policy at the start, paired over secrets.
        seed_gains: The same for each seed alone.
        mean_turns: Lost games count with all their turns.
    """

    method: str
    sampling: str
    games: int
    secrets: int
    seeds: Mapping[int, float]
    rate: Interval
    gain: Interval | None
    seed_gains: Mapping[int, Interval]
    mean_turns: float
    counts: Mapping[str, tuple[float, int]]


def recount(folder: Path) -> list[MethodResult]:
    """Every method of a folder under every sampling, ``start`` first.

    Raises:
        UserError: The folder has no games, or a line of a file cannot be read.
    """
    inside = folder.iterdir() if folder.is_dir() else ()
    methods = sorted(path.name for path in inside if path.is_dir())
    if START in methods:
        methods.remove(START)
        methods.insert(0, START)
    out: list[MethodResult] = []
    for sampling in ("train", "val"):
        started = _load(folder / START, sampling)
        for method in methods:
            games = started if method == START else _load(folder / method, sampling)
            if games:
                out.append(_result(method, sampling, games, None if method == START else started))
    if not out:
        raise UserError(
            f"{folder} holds no games: name a folder with start/seed1-train.jsonl.gz and so on."
        )
    return out


def difference(first: MethodResult, second: MethodResult) -> Interval:
    """Rate of ``second`` minus that of ``first``, paired over secrets."""
    return paired_difference(first.counts, second.counts)


def _load(folder: Path, sampling: str) -> dict[int, list[dict[str, Any]]]:
    games: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl.gz")) if folder.is_dir() else []:
        match = _FILE.search(path.name)
        if match is None or match[2] != sampling:
            continue
        read = read_rows(path)
        if read.damaged:
            raise UserError(
                f"{path}, line {read.damaged[0].number}, cannot be read: copy the file again."
            )
        games[int(match[1])] = list(read.rows)
    return games


def _result(
    method: str,
    sampling: str,
    games: Mapping[int, list[dict[str, Any]]],
    started: Mapping[int, list[dict[str, Any]]] | None,
) -> MethodResult:
    everything = [row for rows in games.values() for row in rows]
    counts = _counts(everything)
    gains: dict[int, Interval] = {}
    gain = None
    if started:
        gains = {
            seed: paired_difference(_counts(started[seed]), _counts(rows))
            for seed, rows in games.items()
            if seed in started
        }
        gain = paired_difference(_counts(row for rows in started.values() for row in rows), counts)
    wins, played = zip(*counts.values(), strict=True)
    return MethodResult(
        method=method,
        sampling=sampling,
        games=len(everything),
        secrets=len(counts),
        seeds={
            seed: float(np.mean([row["strict_status"] for row in rows]))
            for seed, rows in games.items()
        },
        rate=cluster_bootstrap(wins, [float(count) for count in played]),
        gain=gain,
        seed_gains=gains,
        mean_turns=float(np.mean([row["num_questions"] for row in everything])),
        counts=counts,
    )


def _counts(rows: Iterable[dict[str, Any]]) -> Counts:
    out: Counts = {}
    for row in rows:
        wins, games = out.get(row["secret"], (0.0, 0))
        out[row["secret"]] = (wins + row["strict_status"], games + 1)
    return out


def percent(interval: Interval, sign: bool = False) -> str:
    """``82.4 [76.0, 88.1]``, in per cent or points."""
    plus = "+" if sign else ""
    value, low, high = (
        f"{100 * number:{plus}.1f}" for number in (interval.value, interval.low, interval.high)
    )
    return f"{value} [{low}, {high}]"


def table(results: list[MethodResult]) -> str:
    """The results as a Markdown table, by sampling, and each method against the others."""
    lines = [
        "| sampling | method | strict win % | gain over the start, points | seeds, strict win % | "
        "gain of each seed, points | mean turns | games |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        gains = "; ".join(percent(gain, sign=True) for gain in result.seed_gains.values())
        lines.append(
            f"| {result.sampling} | {result.method} | {percent(result.rate)} | "
            f"{percent(result.gain, sign=True) if result.gain else ''} | "
            f"{', '.join(f'{100 * rate:.1f}' for rate in result.seeds.values())} | {gains} | "
            f"{result.mean_turns:.1f} | {result.games} |"
        )
    lines += ["", "| sampling | difference | points |", "|---|---|---|"]
    trained = [result for result in results if result.method != START]
    for index, first in enumerate(trained):
        for second in trained[index + 1 :]:
            if first.sampling == second.sampling:
                lines.append(
                    f"| {first.sampling} | {first.method} minus {second.method} | "
                    f"{percent(difference(second, first), sign=True)} |"
                )
    return "\n".join(lines)
