"""The problems: a function of a seed, a split and a number.

The words of a problem decide its split, so no two splits share one, with whatever seeds and however
many tasks; no problem comes twice in a split.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache

import numpy as np

from delta_belief_rl.envs.agreement.language import (
    ADJECTIVES,
    ADVERBS,
    NOUNS,
    VERBS,
    Problem,
    sums,
)
from delta_belief_rl.envs.agreement.settings import SPLITS
from delta_belief_rl.envs.single_use import digest
from delta_belief_rl.types import Message, Task

SOURCE = "agreement"

_SPLIT_OF = ("train", "train", "train", "train", "val", "test")


@lru_cache(maxsize=16)
def make_tasks(split: str, count: int, seed: int) -> tuple[Task, ...]:
    """The first tasks of a split; fewer are the first ones of more.

    Args:
        split: One of ``SPLITS``.
        count: How many.
        seed: Of all tasks.
    """
    rng = np.random.default_rng([seed, SPLITS.index(split)])
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw(rng)
        if split_of(problem) == split:
            found.setdefault(problem.question(), problem)
    return tuple(
        Task(
            id=f"{split}_{number}",
            source=SOURCE,
            secret=problem.answer(),
            messages=(Message("user", question),),
            split=split,
            scenario=json.dumps(asdict(problem)),
        )
        for number, (question, problem) in enumerate(found.items())
    )


def split_of(problem: Problem) -> str:
    """The split that a problem belongs to."""
    return _SPLIT_OF[int(digest(problem.question()), 16) % len(_SPLIT_OF)]


def draw(rng: np.random.Generator) -> Problem:
    """Any problem; one in three has the result one, so that singular and plural are met."""
    some = sums()
    if rng.random() < 0.25:
        some = tuple(entry for entry in some if entry[1] == "minus" and entry[0] - entry[2] == 1)
    left, operator, right = some[int(rng.integers(len(some)))]
    return Problem(
        left,
        operator,
        right,
        noun=_choice(rng, tuple(NOUNS)),
        verb=_choice(rng, tuple(VERBS)),
        adjective=_choice(rng, ("", *ADJECTIVES)),
        adverb=_choice(rng, ("", *ADVERBS)),
    )


def _choice(rng: np.random.Generator, some: tuple[str, ...]) -> str:
    return some[int(rng.integers(len(some)))]
