"""Guess the number keeps the contract of an environment, and its own rules."""

import pytest
from guess_the_number import ENVIRONMENTS

from delta_belief_rl.envs.check import check_env
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.types import Verdict

PLUGIN = ENVIRONMENTS["guess_the_number"]
OPTIONS = EnvOptions(max_turns=20)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_it_keeps_the_contract(split: str) -> None:
    """Every task of a split."""
    make = PLUGIN.make(OPTIONS)
    for task in PLUGIN.tasks(split, OPTIONS):
        check_env(lambda task=task: make(task), ["50", "50", "", "75 or 80", "7", task.secret])


def test_halving_finds_every_number_in_seven_turns() -> None:
    """The best player wins each game that the rules let it win."""
    make = PLUGIN.make(OPTIONS)
    for task in PLUGIN.tasks("train", OPTIONS):
        game, low, high = make(task), 1, 100
        for _ in range(7):
            middle = (low + high) // 2
            outcome = game.apply(game.parse(f"My number is {middle}."), None)
            if outcome.done:
                break
            low, high = (middle + 1, high) if outcome.reply == "Higher." else (low, middle - 1)
        assert outcome.verdict is Verdict.WIN
