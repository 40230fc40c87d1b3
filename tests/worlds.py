"""A small world for tests: 24 things, 12 properties, every pair told apart."""

from __future__ import annotations

import numpy as np

from delta_belief_rl.envs.base import Env, JudgeReply
from delta_belief_rl.envs.worlds.table import Property, Thing, World
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.types import Task

PROPERTIES = (
    ("alive", ("is it alive", "is it a living thing")),
    ("flies", ("can it fly", "does it fly", "is it able to fly")),
    ("legs", ("does it have legs", "does it have any legs")),
    ("eaten", ("can you eat it", "do people eat it", "is it eaten by people")),
    ("orange", ("is it orange", "is its color orange")),
    ("indoors", ("is it usually found indoors", "would you find it in a house")),
    ("metal", ("is it made of metal", "is it mostly made of metal")),
    ("man_made", ("is it man-made", "is it made by people")),
    ("bigger_than_car", ("is it bigger than a car", "is it larger than a car")),
    ("two_wheels", ("does it have two wheels",)),
    ("one_wheel", ("does it have one wheel",)),
    ("worn", ("do people wear it", "can it be worn")),
)

THINGS = (
    ("dog", ("hound",)),
    ("hot dog", ()),
    ("cat", ()),
    ("orange", ()),
    ("apple", ()),
    ("car", ("automobile",)),
    ("bicycle", ("bike", "push-bike")),
    ("unicycle", ()),
    ("sun", ()),
    ("ice cream", ()),
    ("t-shirt", ("tee shirt",)),
    ("hat", ()),
    ("eagle", ()),
    ("bee", ()),
    ("airplane", ("aeroplane", "plane")),
    ("spoon", ()),
    ("table", ()),
    ("house", ()),
    ("tree", ()),
    ("salt and pepper", ()),
    ("jack-o'-lantern", ()),
    ("whale", ()),
    ("coin", ()),
    ("river", ()),
)


def small_world() -> World:
    """The world; its values are the binary digits of scattered numbers, so all rows differ."""
    codes = [(37 * number + 11) % 256 for number in range(len(THINGS))]
    low = np.array([[code >> bit & 1 for bit in range(8)] for code in codes], dtype=np.bool_)
    high = np.array(
        [[(code * 5 + bit) % 3 == 0 for bit in range(4)] for code in codes], dtype=np.bool_
    )
    names = tuple(name for name, _ in THINGS)
    return World(
        name="small",
        properties=tuple(Property(key, phrasings) for key, phrasings in PROPERTIES),
        things=tuple(Thing(name, "thing", aliases) for name, aliases in THINGS),
        values=np.concatenate([low, high], axis=1),
        splits={"train": names[:14], "val": names[14:18], "test": names[18:]},
    )


def task_for(secret: str, aliases: tuple[str, ...] = ()) -> Task:
    return Task(id="t_0", source="tw_q", secret=secret, messages=(), aliases=aliases)


def ask(env: Env, judge: WorldJudge, text: str) -> tuple[str, str]:
    """Play one action with the table as judge; returns the verdict's value and the reply."""
    action = env.parse(text)
    reply: JudgeReply | None = None
    if action.needs_judge:
        reply = judge.answer([env.judge_request(action)])[0]
    outcome = env.apply(action, reply)
    return outcome.verdict.value, outcome.reply
