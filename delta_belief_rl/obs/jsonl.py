"""``metrics.jsonl``: the record of a run, one JSON object a step.

A line is on the disk before the next step begins. On resume the records after the checkpoint's step
are dropped, so an interrupted and resumed run leaves the same file as a straight one, timings
aside.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from delta_belief_rl.obs.disk import writing
from delta_belief_rl.types import UserError

Scalar = float | int | str | bool | None


class MetricsLog:
    """Append-only writer of one run's metrics.

    Example:
        >>> log = MetricsLog(Path("metrics.jsonl"), run_id="r1")  # doctest: +SKIP
        >>> log.append(1, {"actor/lr": 3e-5})  # doctest: +SKIP
    """

    def __init__(self, path: Path, run_id: str, resume_step: int | None = None) -> None:
        """Open the file, keeping the records up to and including ``resume_step``.

        Args:
            resume_step: Step of the checkpoint that the run resumes from; None for a run that
                starts now, which drops what an earlier start of the same run left.

        Raises:
            UserError: the file belongs to another run.
        """
        self.path = path
        self.run_id = run_id
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[dict[str, Any]] = []
        for record in read_records(path):
            owner = record.get("run_id")
            if owner != run_id:
                raise UserError(
                    f"{path} belongs to run {owner}, not to {run_id}; choose another "
                    "trainer.experiment_name or move the file away."
                )
            if resume_step is not None and record["step"] <= resume_step:
                kept.append(record)
        self.last_step: int | None = kept[-1]["step"] if kept else None
        with writing("The record", path):
            _rewrite(path, kept)

    def append(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Write the record of one step and flush it to the disk.

        Numbers that JSON cannot hold (NaN, infinities) become null.

        Raises:
            ValueError: the step is not above the last one, or a metric takes a reserved name.
            DiskRefused: The disk refuses the line.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step {step} was logged after step {self.last_step}")
        if reserved := {"step", "run_id"} & metrics.keys():
            raise ValueError(f"reserved metric names: {sorted(reserved)}")
        line = _line({"step": step, "run_id": self.run_id, **metrics})
        with writing(f"The record of step {step}", self.path), self.path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.last_step = step


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a JSONL file, in order; an empty list when there is no file.

    A last line that a kill cut short is passed over.

    Raises:
        UserError: a line that is not the last one is no JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    # What stands after the last newline was never finished.
    unfinished = lines.pop()
    del unfinished
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record: object = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(
                f"{path}, line {number}, is no JSON object; repair or remove that line."
            )
        records.append(record)
    return records


def _rewrite(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.writelines(_line(record) for record in records)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _line(record: Mapping[str, Any]) -> bytes:
    plain = {key: None if _unspeakable(value) else value for key, value in record.items()}
    return json.dumps(plain, default=float, ensure_ascii=False).encode() + b"\n"


def _unspeakable(value: object) -> bool:
    """True for floats (NumPy's included) that JSON has no word for."""
    return (
        not isinstance(value, str)
        and hasattr(value, "__float__")
        and not math.isfinite(float(value))  # type: ignore[arg-type]
    )
