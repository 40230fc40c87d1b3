"""Exact posterior bookkeeping."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.envs.worlds.knowledge import Knowledge
from delta_belief_rl.types import UserError
from tests.worlds import PROPERTIES, small_world

WORLD = small_world()
KEYS = [key for key, _ in PROPERTIES]
NAMES = [thing.name for thing in WORLD.things]


def test_the_prior_is_uniform_and_a_fact_keeps_what_fits_it() -> None:
    start = Knowledge.start(WORLD)
    assert start.progress() == 0.0
    np.testing.assert_allclose(start.posterior(), 1 / 24)
    after = start.learn("alive", WORLD.value("dog", "alive"))
    kept = [name for name in NAMES if WORLD.value(name, "alive") == WORLD.value("dog", "alive")]
    assert list(after.names()) == kept
    assert after.progress() == pytest.approx(math.log2(24 / len(kept)))
    assert after.belief() == pytest.approx(dict.fromkeys(kept, 1 / len(kept)))
    assert start.num_consistent == 24


def test_a_wrong_guess_removes_one_thing() -> None:
    after = Knowledge.start(WORLD).rule_out("cat")
    assert "cat" not in after.belief()
    assert after.progress() == pytest.approx(math.log2(24 / 23))


def test_the_prior_can_be_restricted() -> None:
    knowledge = Knowledge.start(WORLD, ["dog", "cat", "sun"])
    assert set(knowledge.names()) == {"dog", "cat", "sun"}
    assert knowledge.rule_out("sun").progress() == pytest.approx(math.log2(1.5))
    with pytest.raises(UserError, match="empty"):
        Knowledge.start(WORLD, [])


def test_contradicting_facts_say_nothing() -> None:
    knowledge = Knowledge.start(WORLD).learn("alive", True).learn("alive", False)
    assert knowledge.num_consistent == 0
    assert knowledge.progress() == 0.0
    assert sum(knowledge.belief().values()) == pytest.approx(1.0)


@settings(max_examples=100, deadline=None)
@given(
    secret=st.sampled_from(NAMES),
    keys=st.lists(st.sampled_from(KEYS), max_size=8),
    guesses=st.lists(st.sampled_from(NAMES), max_size=4),
    seed=st.integers(0, 1000),
)
def test_the_state_does_not_depend_on_the_order_of_facts(
    secret: str, keys: list[str], guesses: list[str], seed: int
) -> None:
    steps = [("ask", key) for key in keys] + [("guess", name) for name in guesses if name != secret]
    shuffled = random.Random(seed).sample(steps, len(steps))
    states: list[Knowledge] = []
    for order in (steps, shuffled):
        knowledge = Knowledge.start(WORLD)
        for kind, name in order:
            known = knowledge.learn(name, WORLD.value(secret, name)) if kind == "ask" else None
            knowledge = known or knowledge.rule_out(name)
        states.append(knowledge)
    first, second = states
    assert first.state_key() == second.state_key()
    assert first.belief() == second.belief()
    assert secret in first.belief()
    assert first.progress() == second.progress()


def test_different_facts_have_different_keys() -> None:
    start = Knowledge.start(WORLD)
    states = [start, *(start.learn(key, value) for key in KEYS for value in (True, False))]
    states += [start.rule_out(name) for name in NAMES]
    assert len({state.state_key() for state in states}) == len(states)


def test_the_split_is_the_share_of_yes() -> None:
    knowledge = Knowledge.start(WORLD, ["dog", "cat", "sun", "hat"])
    rows = [WORLD.index(name) for name in ("dog", "cat", "sun", "hat")]
    np.testing.assert_allclose(knowledge.split(), WORLD.values[rows].mean(axis=0))


def test_useful_facts_exclude_something_alone() -> None:
    knowledge = Knowledge.start(WORLD).learn("alive", True)
    assert knowledge.useful_facts() == {"alive"}
    assert Knowledge.start(WORLD).useful_facts() == frozenset()


def test_a_fact_supports_a_question_that_it_makes_more_informative() -> None:
    knowledge = Knowledge.start(WORLD)
    for key in KEYS[:6]:
        knowledge = knowledge.learn(key, WORLD.value("dog", key))
    for asked in KEYS:
        for fact in knowledge.supporting_facts(asked):
            column = WORLD.values[:, WORLD.property_index(asked)]
            holds = WORLD.values[:, WORLD.property_index(fact)] == WORLD.value("dog", fact)
            assert abs(column[holds].mean() - 0.5) < abs(column.mean() - 0.5)
        assert asked not in knowledge.supporting_facts(asked)
