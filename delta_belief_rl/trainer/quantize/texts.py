"""What a model reads while it is quantised, and what the result is compared on: a judge's prompts.

Things are split by the seed: none is both in a prompt that the scales are chosen by and in one
that the result is compared on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.envs.worlds.table import World
from delta_belief_rl.judge.prompts import judge_messages
from delta_belief_rl.rollout.seeds import named_seed
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.teach.cases import CaseMaker, HeldOut
from delta_belief_rl.types import IntArray

ANSWERS = ("Yes", "No", "Invalid", "Repeated", "Finished")

_CHECKED_SHARE = 0.25
_LONGEST_HISTORY = 19


@dataclass(frozen=True, slots=True)
class JudgeTexts:
    """Prompts as token ids.

    Attributes:
        samples: With the table's answer.
        checked: Up to where the answer begins.
        answers: First token of each word of ``ANSWERS``.
    """

    samples: Sequence[tuple[int, ...]]
    checked: Sequence[tuple[int, ...]]
    answers: tuple[int, ...]


def judge_texts(
    world: World, chat: ChatFormat, samples: int, checked: int, seed: int
) -> JudgeTexts:
    """Prompts of a world's judge; a function of the arguments.

    Every second one shows a history of 1 to 19 questions, under the rules that speak of it.

    Args:
        world: Whose questions.
        chat: Of the model.
        samples: Prompts to choose scales by.
        checked: Prompts to compare on.
        seed: Names the draws.
    """
    rng = np.random.default_rng(named_seed("quantize", "texts", seed))
    order = rng.permutation(len(world.things))
    kept = max(1, int(_CHECKED_SHARE * len(order)))
    cases = CaseMaker(world, HeldOut({}, np.zeros(world.values.shape, dtype=np.bool_)))
    read = _prompts(cases, chat, order[kept:], samples, rng)
    held = _prompts(cases, chat, order[:kept], checked, rng)
    return JudgeTexts(
        samples=[(*prompt, *chat.assistant_ids(answer)) for prompt, answer in read],
        checked=[prompt for prompt, _ in held],
        answers=tuple(chat.assistant_ids(word)[0] for word in ANSWERS),
    )


def _prompts(
    cases: CaseMaker, chat: ChatFormat, things: IntArray, count: int, rng: np.random.Generator
) -> list[tuple[tuple[int, ...], str]]:
    """Prompts and the table's answers; things take turns."""
    found: list[tuple[tuple[int, ...], str]] = []
    for number in range(count):
        thing = int(things[number % len(things)])
        shown = number % 2 == 1
        if shown:
            case = cases.game(thing, int(rng.integers(1, _LONGEST_HISTORY + 1)), 1, rng)[0]
        else:
            case = cases.openings(thing, 1, rng)[0]
        messages = judge_messages(case.request, "direct", shown)
        found.append((chat.open_ids(messages), case.answer))
    return found
