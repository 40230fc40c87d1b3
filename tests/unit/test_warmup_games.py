"""Teacher games of the warm-up: faultless play and exact targets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.knowledge import Knowledge
from delta_belief_rl.envs.worlds.tasks import DEFAULT_PROMPT
from delta_belief_rl.trainer.warmup.actions import enumerate_actions
from delta_belief_rl.trainer.warmup.data import BatchRecipe
from delta_belief_rl.trainer.warmup.games import (
    GameBatch,
    Language,
    Plan,
    Teacher,
    guess_rate,
    plan_games,
    play_games,
    teacher_policy,
)
from delta_belief_rl.trainer.warmup.language import build_language, reader, world_tokenizer
from delta_belief_rl.types import IntArray, UserError
from tests.worlds import small_world

WORLD = small_world()
TOKENIZER = world_tokenizer(WORLD, DEFAULT_PROMPT)
GAMES = 60


@cache
def language() -> Language:
    return build_language(WORLD, TOKENIZER, DEFAULT_PROMPT)


@cache
def full_games() -> GameBatch:
    plan = Plan(np.full(GAMES, 20), np.zeros(GAMES, dtype=np.bool_))
    return play_games(language(), plan, np.random.default_rng(0), Teacher(slip_rate=0.1))


def rows_by_game(batch: GameBatch) -> Iterator[IntArray]:
    for game in range(len(batch.lengths)):
        yield np.flatnonzero(batch.turn_game == game)


def test_the_grammar_reads_every_action_as_what_it_asks() -> None:
    read = reader(WORLD, TOKENIZER, Grammar(WORLD))
    actions = language().actions
    for tokens, prop, thing in zip(
        actions.tokens, actions.property_of, actions.thing_of, strict=True
    ):
        assert read(tokens) == (prop, thing)


def test_wordings_of_each_thing_and_property_sum_to_one() -> None:
    actions = language().actions
    for of, count in ((actions.property_of, 12), (actions.thing_of, 24)):
        sums = np.bincount(of[of >= 0], actions.wording[of >= 0], minlength=count)
        assert sums == pytest.approx(np.ones(count))


def test_the_teacher_never_repeats_itself_except_in_slips() -> None:
    batch, actions = full_games(), language().actions
    for rows in rows_by_game(batch):
        said = batch.turn_action[rows[~batch.turn_slip[rows]]]
        asked = [(actions.property_of[a], actions.thing_of[a]) for a in said]
        assert len(set(asked)) == len(asked)


def test_the_teacher_guesses_only_consistent_things() -> None:
    batch, actions = full_games(), language().actions
    thing = actions.thing_of[batch.turn_action]
    guesses = np.flatnonzero((thing >= 0) & ~batch.turn_slip)
    assert len(guesses) > GAMES / 2
    assert batch.consistent[guesses, thing[guesses]].all()


def test_the_posterior_equals_exact_knowledge() -> None:
    batch, actions = full_games(), language().actions
    for game, rows in enumerate(rows_by_game(batch)):
        knowledge = Knowledge.start(WORLD)
        for row in rows:
            assert batch.posterior()[row] == pytest.approx(knowledge.posterior())
            action = batch.turn_action[row]
            if batch.turn_slip[row] or row == rows[-1]:
                continue
            if actions.thing_of[action] >= 0:
                name = WORLD.things[actions.thing_of[action]].name
                knowledge = knowledge.rule_out(name)
            else:
                start = batch.turn_start[row] + len(actions.tokens[action])
                said = batch.token_ids[game, start : start + len(language().yes)]
                key = WORLD.properties[actions.property_of[action]].key
                knowledge = knowledge.learn(key, tuple(said) == language().yes)


def test_games_end_with_the_right_guess() -> None:
    batch, actions = full_games(), language().actions
    ends = [rows[-1] for rows in rows_by_game(batch)]
    assert np.mean([actions.thing_of[batch.turn_action[row]] >= 0 for row in ends]) > 0.9


def test_policy_rows_sum_to_one_and_never_name_what_is_ruled_out() -> None:
    batch, actions = full_games(), language().actions
    policy = batch.action_probabilities(actions)
    assert policy.sum(axis=1) == pytest.approx(np.ones(len(policy)))
    guesses = np.flatnonzero(actions.thing_of >= 0)
    ruled_out = ~batch.consistent[:, actions.thing_of[guesses]]
    assert (policy[:, guesses][ruled_out] == 0).all()


def test_soft_labels_of_a_name_are_the_posterior_over_its_first_tokens() -> None:
    batch, actions = full_games(), language().actions
    policy = batch.action_probabilities(actions)
    before = [TOKENIZER.encode("Is it '", add_special_tokens=False)]
    quoted = next(a for a, tokens in enumerate(actions.tokens) if list(tokens[:3]) == before[0])
    node = actions.paths[quoted][3]
    for row in range(0, len(policy), 7):
        labels = actions.targets(policy[row], node)
        assert sum(labels.values()) == pytest.approx(1.0)
        expected: dict[int, float] = {}
        left = np.flatnonzero(batch.consistent[row])
        for thing in left:
            name = WORLD.things[thing].name
            first = TOKENIZER.encode(name, add_special_tokens=False)[0]
            expected[first] = expected.get(first, 0.0) + 1 / len(left)
        assert labels == pytest.approx(expected)


def test_the_loss_mask_covers_whole_turns_and_nothing_else() -> None:
    batch, actions = full_games(), language().actions
    mask = batch.loss_mask()
    for row, action in enumerate(batch.turn_action):
        if batch.turn_slip[row]:
            continue
        tokens = actions.tokens[action]
        span = slice(batch.turn_start[row], batch.turn_start[row] + len(tokens))
        assert tuple(batch.token_ids[batch.turn_game[row], span]) == tokens
        assert mask[batch.turn_game[row], span].all()
    assert mask.sum() == len(batch.token_turn)
    assert (batch.token_ids[mask] != language().pad).all()


def test_selecting_games_keeps_their_tokens_and_targets() -> None:
    batch = full_games()
    part = batch.select(np.array([7, 3]))
    assert (part.lengths == batch.lengths[[7, 3]]).all()
    rows = np.flatnonzero(batch.turn_game == 3)
    assert (part.consistent[part.turn_game == 1] == batch.consistent[rows]).all()
    length = part.lengths[1]
    assert (part.token_ids[1, :length] == batch.token_ids[3, :length]).all()
    assert part.loss_mask()[1].sum() == batch.loss_mask()[3].sum()


def test_the_first_games_have_one_question_and_a_guess() -> None:
    batch = BatchRecipe(language(), 0, 16, 20, Teacher(slip_rate=0)).make(0, 0.0)
    kinds = language().actions.thing_of[batch.turn_action] >= 0
    for rows in rows_by_game(batch):
        assert kinds[rows][-1]
        assert len(rows) == 2 or kinds[rows][0]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.9, 1.0])
def test_plans_stay_within_the_turn_limit(share: float) -> None:
    plan = plan_games(share, 200, 20, np.random.default_rng(0))
    assert int((plan.turns + plan.guess).max()) <= (2 if share < 0.1 else 21)
    assert ((plan.turns > 0) | plan.guess).all()


def test_equal_seeds_give_equal_batches_and_other_steps_other_ones() -> None:
    recipe = BatchRecipe(language(), 5, 8, 10)
    first, again, other = recipe.make(3, 0.5), recipe.make(3, 0.5), recipe.make(4, 0.5)
    assert np.array_equal(first.token_ids, again.token_ids)
    assert not np.array_equal(first.token_ids, other.token_ids)


def test_the_teacher_guesses_for_sure_when_one_thing_is_left() -> None:
    left = np.array([1, 2, 3, 4, 6, 20])
    rates = guess_rate(left)
    assert rates[0] == 1.0
    assert (np.diff(rates) < 0).all()
    assert (rates > 0).all()


def test_the_share_of_informative_questions_is_as_set() -> None:
    values = np.array([[1, 0, 1], [0, 0, 1], [1, 0, 1]], dtype=np.bool_)
    consistent, asked = np.ones((1, 3), np.bool_), np.zeros((1, 3), np.bool_)
    ask, rate = teacher_policy(consistent, asked, values, informative=0.4)
    assert ask[0] / (1 - rate[0]) == pytest.approx([0.4 + 0.2, 0.2, 0.2])


def test_sentences_with_equal_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="same tokens"):
        enumerate_actions([["a"], ["b"]], [], lambda _: [1], 0)
