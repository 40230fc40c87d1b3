"""The record of a study: what every finished run won, secret by secret, in one small file.

Everything that the page says is counted anew from these numbers by the package's own statistics, so
the record holds no interval and no p-value. The games won of each secret stand as one string of
digits, in the order of the record's secrets.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from delta_belief_rl.cli.compare_cells import Cell, read_record
from delta_belief_rl.cli.compare_plan import Study as Comparing
from delta_belief_rl.eval.compare_results import Budget, CellResult, Evaluation, kept_cell
from delta_belief_rl.types import UserError

Record = dict[str, Any]

_SHARED = ("study", "settings", "steps", "budget", "baseline", "seeds", "secrets")
"""What two records must have alike before one goes on with the other."""
_MOST_GAMES = 9
"""Of a secret in a validation: one digit each."""
_PLACE = re.compile(r"(?<![\w.])(?<!:/)(?:/[^\s/'\"(),;:]+)+/")
"""The folders of an absolute path."""
_SIZES = ("steps", "games", "tokens", "seconds", "host_gib")


def condense(name: str, steps: int, settings: Sequence[str], study: Comparing) -> Record:
    """What the runs of a study have brought, those that are done and those that failed.

    A run that is done and whose files cannot be used stands among those that failed.

    Args:
        name: Of the study.
        steps: Training steps of a run.
        settings: Of every run.
        study: Its runs.

    Raises:
        UserError: A validation has too many games of a secret.
    """
    found: dict[tuple[str, int], CellResult] = {}
    wall: dict[tuple[str, int], float] = {}
    failures: list[Record] = []
    for cell in study.cells:
        key = (cell.method, cell.seed)
        try:
            record = read_record(cell)
            cause = record.cause
            if record.done:
                found[key] = kept_cell(cell.folder, study.budget, cell.result)
                wall[key] = record.seconds
        except UserError as error:
            cause = str(error)
        if cause:
            cause = _placeless(cause, cell)
            failures.append({"method": cell.method, "seed": cell.seed, "cause": cause})
    secrets = sorted(
        {task for one in found.values() for each in one.evaluations for task in each.counts}
    )
    return {
        "study": name,
        "settings": list(settings),
        "steps": steps,
        "budget": {
            field: getattr(study.budget, field) for field in ("steps", "secrets", "games", "turns")
        },
        "baseline": study.baseline,
        "seeds": list(study.seeds),
        "secrets": secrets,
        "methods": list(study.methods),
        "labels": {method: str(study.labels[method]) for method in study.methods},
        "differing": {
            method: list(study.differing[method])
            for method in study.methods
            if study.differing[method]
        },
        "facts": {key: value for key, value in study.facts.items() if key != "settings"},
        "cells": [
            {
                "method": method,
                "seed": seed,
                "wall": round(wall[method, seed], 1),
                **{size: _plain(getattr(one, size)) for size in _SIZES},
                "evaluations": [_condensed(each, secrets) for each in one.evaluations],
            }
            for (method, seed), one in found.items()
        ],
        "failures": failures,
    }


def _placeless(cause: str, cell: Cell) -> str:
    """A cause without the folders of the machine that it was found on."""
    text = cause.replace(f" ({cell.log})", "").replace(f"{cell.folder.parent}/", "")
    return _PLACE.sub("", text).rstrip(".")


def _condensed(one: Evaluation, secrets: Sequence[str]) -> Record:
    counts = [one.counts.get(secret, (0.0, 0)) for secret in secrets]
    if max((games for _, games in counts), default=0) > _MOST_GAMES:
        raise UserError(
            f"A record holds up to {_MOST_GAMES} games of a secret: lower multi_turn.val.n."
        )
    games = "".join(str(games) for _, games in counts)
    return {
        "step": one.step,
        "spent": one.spent,
        "turns": _plain(one.turns),
        "failed": one.failed,
        "won": "".join(f"{won:.0f}" for won, _ in counts),
        # Where all secrets have the same number, it stands once.
        "games": games[:1] if len(set(games)) == 1 else games,
    }


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


# ---------------------------------------------------------------------------------------- reading


def budget_of(record: Mapping[str, Any]) -> Budget:
    """What every run of the record could spend."""
    return Budget(**record["budget"])


def cells_of(record: Mapping[str, Any]) -> dict[str, dict[int, CellResult]]:
    """Method to seed to what its run brought, methods in the order of the record."""
    cells: dict[str, dict[int, CellResult]] = {method: {} for method in record["methods"]}
    for cell in record["cells"]:
        evaluations = tuple(_evaluation(one, record["secrets"]) for one in cell["evaluations"])
        numbers = {size: _number(cell[size]) for size in _SIZES}
        cells[cell["method"]][cell["seed"]] = CellResult(
            evaluations=evaluations,
            steps=cell["steps"],
            games=cell["games"],
            tokens=numbers["tokens"],
            seconds=numbers["seconds"],
            host_gib=numbers["host_gib"],
            gpu_gib=math.nan,
        )
    return cells


def _evaluation(one: Mapping[str, Any], secrets: Sequence[str]) -> Evaluation:
    games = one["games"] * len(secrets) if len(one["games"]) == 1 else one["games"]
    counts = {
        secret: (float(won), int(played))
        for secret, won, played in zip(secrets, one["won"], games, strict=True)
    }
    return Evaluation(one["step"], one["spent"], counts, _number(one["turns"]), one["failed"])


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def complete(record: Mapping[str, Any]) -> list[str]:
    """Methods with a finished run of every seed."""
    cells = cells_of(record)
    return [method for method, seeds in cells.items() if set(seeds) >= set(record["seeds"])]


def merged(ours: Record, theirs: Mapping[str, Any]) -> Record:
    """A record with the runs of another one that it does not have.

    Raises:
        UserError: They are of different settings.
    """
    for name in _SHARED:
        # A record without a run knows no secrets.
        if ours[name] != theirs[name] and not (name == "secrets" and not ours["cells"]):
            raise UserError(
                f"Two records of {ours['study']} differ in {name}: they cannot be put together."
            )
    have = {(cell["method"], cell["seed"]) for cell in ours["cells"]}
    more = [cell for cell in theirs["cells"] if (cell["method"], cell["seed"]) not in have]
    done = have | {(cell["method"], cell["seed"]) for cell in more}
    lost = [*ours["failures"], *theirs["failures"]]
    places: dict[tuple[str, int], Record] = {(one["method"], one["seed"]): one for one in lost}
    body = dict(ours)
    body["secrets"] = theirs["secrets"] or ours["secrets"]
    body["cells"] = [*ours["cells"], *more]
    body["failures"] = [one for key, one in places.items() if key not in done]
    body["methods"] = list(dict.fromkeys([*ours["methods"], *theirs["methods"]]))
    for name in ("labels", "differing"):
        body[name] = {**theirs[name], **ours[name]}
    machines = [*theirs["machines"], *ours.get("machines", ())]
    body["machines"] = [one for at, one in enumerate(machines) if one not in machines[:at]]
    return body


def load(path: Path) -> Record:
    """A record.

    Raises:
        UserError: It is missing or damaged.
    """
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): make it by a study.") from error
    if not isinstance(body, dict) or "cells" not in body:
        raise UserError(f"{path} is no record of a study.")
    return body


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, whole or not at all, a line for each run."""
    head = json.dumps({**record, "cells": []}, indent=1, ensure_ascii=False)
    lines = ",\n".join(
        "  " + json.dumps(cell, separators=(",", ":"), ensure_ascii=False)
        for cell in record["cells"]
    )
    body = head.replace('"cells": []', f'"cells": [\n{lines}\n ]' if lines else '"cells": []')
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(body + "\n", encoding="utf-8")
    os.replace(beside, path)
