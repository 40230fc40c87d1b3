"""Clinical cases: a function of a seed, a split and a number.

A case is a sheet, a stratum, a hidden state drawn from the stratum's prior, and an opening. Sheets
and strata take turns, so that any number of cases has them in equal shares. The text of the opening
decides the split that a case belongs to: no two splits share one, with whatever seeds and however
many cases. What a question is answered follows from the case's name (``Sheet.reply``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from delta_belief_rl.envs.clinical.sheets import STRATA, Sheet, sheets
from delta_belief_rl.envs.single_use import digest
from delta_belief_rl.types import Message, Task

SOURCE = "clinical"
"""A task's source is this and its stratum, e.g. ``clinical_high``; metrics by source are so by
stratum."""
SPLITS = ("train", "val", "test")

NAMES = (
    *("Mr Abel", "Ms Bruns", "Mr Castell", "Ms Dorn", "Mr Eames", "Ms Falk", "Mr Gerin", "Ms Holm"),
    *("Mr Ives", "Ms Jarl", "Mr Kolb", "Ms Lund", "Mr Mays", "Ms Noor", "Mr Orlo", "Ms Pell"),
    *("Mr Quist", "Ms Rahn", "Mr Sorel", "Ms Tamm", "Mr Ulm", "Ms Vance", "Mr Weld", "Ms Yost"),
)

_SPLIT_OF = ("train", "train", "train", "train", "val", "test")
_ROLE = (
    "You handle a case of a made-up clinic. Something about it is hidden. In each turn write one "
    "message: ask one question, order one test, or decide. Decide when you know enough; a wrong "
    'decision does harm, and the case ends with it. To decide, write "Decision:" and one of: '
)


@dataclass(frozen=True, slots=True)
class Case:
    """What ``Task.scenario`` holds, as JSON.

    Attributes:
        key: Names the replies.
        sheet: A name of ``sheets.sheets()``.
        stratum: One of ``sheets.STRATA``.
        state: The hidden state, a key of ``Sheet.states``.
    """

    key: str
    sheet: str
    stratum: str
    state: str

    def to_json(self) -> str:
        """The text that ``from_json`` reads."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The case of a scenario.

        Raises:
            KeyError, TypeError, ValueError: The text describes no case.
        """
        case = cls(**json.loads(text))
        if case.state not in sheets()[case.sheet].states or case.stratum not in STRATA:
            raise ValueError(f"{case.sheet} has no {case.state!r} at {case.stratum!r} risk")
        return case


@lru_cache(maxsize=32)
def make_tasks(
    split: str, count: int, seed: int, simulators: tuple[str, ...], explain: bool
) -> tuple[Task, ...]:
    """The first cases of a split.

    Args:
        split: One of ``SPLITS``.
        count: How many; a smaller number gives the first ones of a larger number.
        seed: Of all cases.
        simulators: Those that cases are drawn from.
        explain: Whether the opening lists what can be asked.
    """
    chosen = [sheet for sheet in sheets().values() if sheet.simulator in simulators]
    pairs = [(sheet, stratum) for sheet in chosen for stratum in STRATA]
    return tuple(_task(split, n, seed, *pairs[n % len(pairs)], explain) for n in range(count))


def split_of(opening: str) -> str:
    """The split that an opening belongs to."""
    return _SPLIT_OF[int(digest(opening), 16) % len(_SPLIT_OF)]


def rules(sheet: Sheet, explain: bool) -> str:
    """What an opening says before the patient does."""
    decisions = [one.say for one in sheet.decisions.values()]
    text = f"{_ROLE}{', '.join(decisions)}."
    if explain:
        text += " You can say: " + " ".join(one.say for one in sheet.questions.values())
    return text


def _task(split: str, number: int, seed: int, sheet: Sheet, stratum: str, explain: bool) -> Task:
    # A number names the same case whatever simulators there are beside its own.
    rng = np.random.default_rng(
        [seed, SPLITS.index(split), number, int(digest(f"{sheet.name}|{stratum}"), 16) % 2**32]
    )
    while True:
        opening = _opening(sheet, stratum, rng)
        if split_of(opening) == split:
            break
    states = tuple(sheet.states)
    state = states[int(rng.choice(len(states), p=sheet.prior[stratum]))]
    case = Case(f"{seed}/{split}/{number}/{digest(opening)}", sheet.name, stratum, state)
    return Task(
        id=f"{split}_{number}",
        source=f"{SOURCE}_{stratum}",
        secret=sheet.states[state],
        messages=(Message("user", f"{rules(sheet, explain)}\n\n{opening}"),),
        split=split,
        scenario=case.to_json(),
    )


def _opening(sheet: Sheet, stratum: str, rng: np.random.Generator) -> str:
    def pick(texts: tuple[str, ...]) -> str:
        return texts[int(rng.integers(len(texts)))]

    name, age, days = pick(NAMES), int(rng.integers(25, 85)), int(rng.integers(2, 15))
    said = pick(sheet.openings).format(name=name, age=age, days=days)
    return f"{said} {pick(sheet.risk[stratum])}"
