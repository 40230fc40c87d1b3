"""Runs that were never played, written as a run leaves them, for the tests of comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from delta_belief_rl.obs.jsonl import MetricsLog
from delta_belief_rl.rollout.store import write_groups
from delta_belief_rl.types import Group, StopReason, Task, Trajectory, Turn, Verdict

MAX_TURNS = 4


def game(secret: str, number: int, won: bool, turns: int = 2, failed: bool = False) -> Trajectory:
    """A game whose last turn says how it ended."""
    made: list[Turn] = []
    for index in range(turns):
        last = index == turns - 1
        verdict = Verdict.WIN if won and last else Verdict.NO
        if failed and last:
            verdict = Verdict.ERROR
        end = won and last
        made.append(
            Turn(
                *(index, 2 + 3 * index, 4 + 3 * index, (-0.5, -0.5), 0, "q", "No", verdict),
                strict_win=end,
                compatible_win=end,
            )
        )
    stop = StopReason.WIN if won else StopReason.JUDGE_FAILED if failed else StopReason.TURN_LIMIT
    task = Task(secret, "fake", secret, (), "val")
    return Trajectory(task, number, tuple(range(2 + 3 * turns)), tuple(made), stop)


def write_validation(
    run_dir: Path, step: int, wins: Mapping[str, Sequence[bool]], turns: int = 2
) -> None:
    """``validation/<step>.jsonl`` with these games of each secret."""
    groups = [
        Group(
            Task(secret, "fake", secret, (), "val"),
            tuple(game(secret, number, won, turns) for number, won in enumerate(games)),
        )
        for secret, games in wins.items()
    ]
    write_groups(run_dir / "validation" / f"{step}.jsonl", groups, max_turns=MAX_TURNS)


def drawn_wins(
    rng: np.random.Generator, rate: float, secrets: int, games: int
) -> dict[str, list[bool]]:
    """Games that are won with one chance, whatever the secret."""
    return {f"s{at}": [bool(won) for won in rng.random(games) < rate] for at in range(secrets)}


def write_run(
    run_dir: Path,
    rates: Mapping[int, float],
    *,
    seed: int = 0,
    secrets: int = 20,
    games: int = 4,
    batches: int = 1,
    seconds: float = 1.5,
) -> Path:
    """A run that validated at some steps, with chances of winning, and made all steps between."""
    rng = np.random.default_rng([seed, 7])
    last = max(rates)
    log = MetricsLog(run_dir / "metrics.jsonl", "fake")
    log.append(0, {"val-core/strict_success_rate": 0.0})
    for step in range(1, last + 1):
        log.append(
            step,
            {
                "train/num_gen_batches": float(batches),
                "state_tokens/sampled": 100.0,
                "timing_s/step": seconds,
                "perf/cpu_memory_used_gb": 0.5 + step / 10,
            },
        )
    for step, rate in rates.items():
        write_validation(run_dir, step, drawn_wins(rng, rate, secrets, games))
    return run_dir
