"""What one run of a comparison brought, read from the files in its folder.

``validation/<step>.jsonl`` has the games by secret, ``metrics.jsonl`` what was spent on them. The
budget counts what an agent may do: games played, those of groups that were left out included, times
the most turns of a game. Two methods with the same settings spend the same in a step. One that
plays batch after batch until it has enough (``algorithm.filter_groups``) spends more, and so does
one that plays games as trees (``algorithm.tree``) by the turns that it plays for each turn of a
game that it trains on, where those that games share are played once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from delta_belief_rl.algo.shapers.channels import WinRule, is_void
from delta_belief_rl.eval.compare_statistics import curve_mean
from delta_belief_rl.eval.statistics import mean_at_n
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.types import FloatArray, Trajectory, UserError


@dataclass(frozen=True, slots=True)
class Budget:
    """What every run of a comparison may spend.

    Attributes:
        steps: Training steps.
        secrets: Of a step.
        games: Of a secret.
        turns: Most turns of a training game.
    """

    steps: int
    secrets: int
    games: int
    turns: int

    @property
    def step_turns(self) -> int:
        """Turns that the games of one batch may take."""
        return self.secrets * self.games * self.turns

    @property
    def total(self) -> int:
        """Turns that a run may take."""
        return self.steps * self.step_turns


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One validation of one run.

    Attributes:
        spent: Turns of the budget before it.
        counts: Task to (strict wins, games with an outcome).
        turns: Mean over the games with an outcome, lost ones included.
        failed: Games without an outcome.
    """

    step: int
    spent: int
    counts: Mapping[str, tuple[float, int]]
    turns: float
    failed: int

    @property
    def rate(self) -> float:
        """Mean over secrets of the share of games won; NaN without a game."""
        return mean_at_n(np.array([[_rate(one)] for one in self.counts.values()]).reshape(-1, 1))


@dataclass(frozen=True, slots=True)
class CellResult:
    """One method with one seed.

    Attributes:
        evaluations: Those within the budget, by step; at least one.
        steps: Training steps that were made within it.
        games: Training games played in them.
        tokens: Sampled in the games that were trained on.
        seconds: Of these steps, without validation and saving.
        host_gib, gpu_gib: Peaks of host memory (driver and training ranks) and of GPU memory in the
            training ranks; NaN where not measured.
    """

    evaluations: tuple[Evaluation, ...]
    steps: int
    games: int
    tokens: float
    seconds: float
    host_gib: float
    gpu_gib: float

    @property
    def final(self) -> Evaluation:
        """The last validation within the budget."""
        return self.evaluations[-1]

    def rates(self, secrets: Sequence[str]) -> FloatArray:
        """Share of games won of each secret at each evaluation, ``[E, Q]``."""
        rows = [
            [_rate(evaluation.counts.get(secret, (0.0, 0))) for secret in secrets]
            for evaluation in self.evaluations
        ]
        return np.array(rows).reshape(len(rows), len(secrets))

    def areas(self, secrets: Sequence[str], budget: Budget) -> FloatArray:
        """Mean height of each secret's learning curve over the budget, ``[Q]``.

        From the first evaluation on; the last one stands for what is left of the budget.
        """
        rates = self.rates(secrets)
        x = [float(evaluation.spent) for evaluation in self.evaluations]
        if x[-1] < budget.total:
            x.append(float(budget.total))
            rates = np.vstack([rates, rates[-1:]])
        return curve_mean(x, rates.T)


def kept_cell(run_dir: Path, budget: Budget, place: Path) -> CellResult:
    """:func:`read_cell`, kept in a small file for the next time.

    The file is used while the budget and the run's own files are those that it was made of.

    Args:
        place: The file.

    Raises:
        UserError: As of :func:`read_cell`.
    """
    made_of = {"budget": asdict(budget), "files": _stamps(run_dir)}
    # Where there is none, or one that was cut, it is made anew.
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        kept = json.loads(place.read_bytes())
        if kept["of"] == made_of:
            return _rebuilt(kept["result"])
    result = read_cell(run_dir, budget)
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    body = json.dumps({"of": made_of, "result": asdict(result)}, separators=(",", ":"))
    # A disk that does not take it costs time at the next reading, and no result.
    with suppress(OSError):
        beside.write_text(body + "\n", encoding="utf-8")
        os.replace(beside, place)
    return result


def _stamps(run_dir: Path) -> dict[str, list[int]]:
    """Size and time of each file that a result is read from."""
    paths = [run_dir / "metrics.jsonl", *(run_dir / "validation").glob("*.jsonl")]
    found = {path.name: path.stat() for path in paths if path.exists()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in sorted(found.items())}


def _rebuilt(fields: Mapping[str, Any]) -> CellResult:
    evaluations = tuple(
        Evaluation(
            **{
                **one,
                "counts": {task: (wins, games) for task, (wins, games) in one["counts"].items()},
            }
        )
        for one in fields["evaluations"]
    )
    return CellResult(**{**fields, "evaluations": evaluations})


def read_cell(run_dir: Path, budget: Budget) -> CellResult:
    """Read a run that is over.

    Raises:
        UserError: It has no validation within the budget, or a file is damaged.
    """
    records = [one for one in read_records(run_dir / "metrics.jsonl") if one["step"] > 0]
    spent = _spent(records, budget)
    within = [one for one in records if spent[one["step"]] <= budget.total]
    files = sorted(
        (path for path in (run_dir / "validation").glob("*.jsonl") if path.stem.isdigit()),
        key=lambda path: int(path.stem),
    )
    evaluations = tuple(
        _evaluation(path, spent[int(path.stem)])
        for path in files
        if spent.get(int(path.stem), math.inf) <= budget.total
    )
    if not evaluations:
        raise UserError(
            f"{run_dir} has no validation within the budget of {budget.total} turns: set "
            "trainer.test_freq lower, or leave trainer.val_before_train on."
        )
    return CellResult(
        evaluations=evaluations,
        steps=len(within),
        games=int(spent[within[-1]["step"]] / budget.turns) if within else 0,
        tokens=sum(_numbers(within, "state_tokens/sampled")),
        seconds=sum(_numbers(within, "timing_s/step")),
        host_gib=max(_numbers(within, "perf/cpu_memory_used_gb"), default=math.nan),
        gpu_gib=max(_numbers(within, "perf/max_memory_allocated_gb"), default=math.nan),
    )


def _spent(records: Sequence[Mapping[str, Any]], budget: Budget) -> dict[int, int]:
    """Turns of the budget that are spent after each step; nothing is before the first."""
    spent, total = {0: 0}, 0
    for record in records:
        total += round(_times(record) * budget.step_turns)
        spent[record["step"]] = total
    return spent


def _times(record: Mapping[str, Any]) -> float:
    """How often a step played what one batch of whole games takes."""
    played, trained = record.get("state_turns/played"), record.get("state_turns/total")
    if played and trained:
        # The turns of all games are of those that were kept; of several batches a whole one is.
        whole = float(record.get("train/num_gen_batches") or 1.0) == 1.0
        share = float(record.get("train/kept_group_share") or 1.0) if whole else 1.0
        return share * float(played) / float(trained)
    return float(record.get("train/num_gen_batches") or 1.0)


def _numbers(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(record[name]) for record in records if record.get(name) is not None]


def _evaluation(path: Path, spent: int) -> Evaluation:
    report = read_trajectories(path)
    if report.damaged:
        first = report.damaged[0]
        raise UserError(f"{path}, line {first.number}, is damaged ({first.reason}): run it anew.")
    counts: dict[str, tuple[float, int]] = {}
    known: list[Trajectory] = []
    for game in report.trajectories:
        wins, games = counts.get(game.task.id, (0.0, 0))
        if not is_void(game, WinRule.STRICT):
            wins, games = wins + game.strict_win, games + 1
            known.append(game)
        counts[game.task.id] = (wins, games)
    turns = float(np.mean([game.num_turns for game in known])) if known else math.nan
    failed = len(report.trajectories) - len(known)
    return Evaluation(int(path.stem), spent, counts, turns, failed)


def _rate(counts: tuple[float, int]) -> float:
    wins, games = counts
    return wins / games if games else math.nan
