"""The players of the embedded world, and the games they play."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.knowledge import Knowledge
from delta_belief_rl.envs.worlds.players import (
    GameRecord,
    MediocrePlayer,
    Player,
    RandomPlayer,
    SplitterPlayer,
    play,
    win_rate,
)
from delta_belief_rl.types import UserError, Verdict
from tests.worlds import small_world

WORLD = small_world()
GRAMMAR = Grammar(WORLD)
NAMES = [thing.name for thing in WORLD.things]
ALL = (RandomPlayer, MediocrePlayer, SplitterPlayer)


def _game(kind: Callable[..., Player], secret: str, turns: int, seed: int) -> GameRecord:
    return play(kind(GRAMMAR, turns), WORLD, secret, turns, np.random.default_rng(seed), GRAMMAR)


@pytest.mark.parametrize("kind", ALL)
def test_players_never_repeat_and_guess_only_what_fits(kind: Callable[..., Player]) -> None:
    for seed, secret in enumerate(NAMES):
        record = _game(kind, secret, 10, seed)
        assert not {Verdict.REPEATED, Verdict.INVALID, Verdict.ERROR} & set(record.verdicts)
        knowledge = Knowledge.start(WORLD)
        for text, _ in record.texts:
            parsed = GRAMMAR.parse(text)
            if parsed.kind == "guess" and parsed.thing is not None:
                assert parsed.thing in knowledge.names()
                knowledge = knowledge.rule_out(parsed.thing)
            else:
                assert parsed.property_key is not None
                truth = WORLD.value(secret, parsed.property_key)
                knowledge = knowledge.learn(parsed.property_key, truth)


@pytest.mark.parametrize("kind", ALL)
def test_a_game_is_a_function_of_its_seed(kind: Callable[..., Player]) -> None:
    games = [_game(kind, "whale", 8, 7) for _ in range(2)]
    assert games[0] == games[1]
    assert len({_game(kind, "whale", 8, seed).texts for seed in range(5)}) > 1


@pytest.mark.parametrize("kind", ALL)
def test_the_last_turn_is_a_guess(kind: Callable[..., Player]) -> None:
    for seed in range(10):
        record = _game(kind, "river", 3, seed)
        assert GRAMMAR.parse(record.texts[-1][0]).kind == "guess"


def test_the_splitter_always_wins_and_is_the_fastest() -> None:
    results = {kind: win_rate(kind, WORLD, NAMES, 12, 120, seed=1) for kind in ALL}
    assert results[SplitterPlayer].rate == 1.0
    assert results[SplitterPlayer].mean_turns < 7.0
    assert results[SplitterPlayer].mean_turns < min(
        results[MediocrePlayer].mean_turns, results[RandomPlayer].mean_turns
    )


def test_more_turns_win_more_games() -> None:
    rates = [
        win_rate(MediocrePlayer, WORLD, NAMES, turns, 150, seed=2).rate for turns in (3, 6, 12)
    ]
    assert rates[0] < rates[1] < rates[2]


def test_win_rates_are_reproducible_and_count_lost_games_in_full() -> None:
    first = win_rate(RandomPlayer, WORLD, NAMES, 4, 50, seed=3)
    assert first == win_rate(RandomPlayer, WORLD, NAMES, 4, 50, seed=3)
    assert 0 < first.wins < 50
    assert first.mean_turns > 3.0
    with pytest.raises(UserError, match="at least one"):
        win_rate(RandomPlayer, WORLD, [], 4, 50, seed=3)


def test_the_prior_of_a_player_can_be_restricted() -> None:
    player = SplitterPlayer(GRAMMAR, 10, candidates=["dog", "cat"])
    record = play(player, WORLD, "cat", 10, np.random.default_rng(0), GRAMMAR)
    assert record.won
    assert record.turns <= 2


def test_the_mediocre_player_varies_its_wording() -> None:
    texts = {text for seed in range(60) for text, _ in _game(MediocrePlayer, "dog", 10, seed).texts}
    for key in ("eaten", "indoors"):
        assert len({text for text in texts if GRAMMAR.parse(text).property_key == key}) > 1
    guesses = {text for text in texts if GRAMMAR.parse(text).kind == "guess"}
    assert any("'" in text for text in guesses)
    assert any(" a " in text for text in guesses)


def test_informative_questions_make_a_better_player() -> None:
    def poor(grammar: Grammar, turns: int) -> MediocrePlayer:
        return MediocrePlayer(grammar, turns, informative=0.0)

    def good(grammar: Grammar, turns: int) -> MediocrePlayer:
        return MediocrePlayer(grammar, turns, informative=1.0)

    turns = [win_rate(kind, WORLD, NAMES, 12, 150, seed=4).mean_turns for kind in (poor, good)]
    assert turns[0] > turns[1]


def test_a_world_without_the_secret_among_the_candidates_ends_in_a_sentence() -> None:
    player = SplitterPlayer(GRAMMAR, 30, candidates=["dog"])
    with pytest.raises(UserError, match="every question was asked"):
        play(player, WORLD, "cat", 30, np.random.default_rng(0), GRAMMAR)
