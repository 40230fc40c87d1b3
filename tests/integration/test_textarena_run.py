"""A game of TextArena trains and validates through the loop, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_belief_rl.types import StopReason, Verdict
from tests import tiny_runs
from tests.tiny_runs import played, text_tokenizer, write_policy

pytest.importorskip("textarena")

OPENING = "Guess the number between 1 and 20: write it in square brackets, for example [5]."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("model"), text_tokenizer([OPENING], 400))


def command(out: Path, model: Path) -> list[str]:
    tasks = "multi_turn.env_kwargs.tasks={train: 8, val: 3, test: 0}"
    game = "multi_turn.env_kwargs.game=GuessTheNumber-v0"
    return tiny_runs.command(out, model, "textarena", game, tasks)


@pytest.mark.slow
def test_a_game_of_textarena_trains_and_validates_through_the_loop(
    tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "run"
    run = played(out, command(out, model))
    assert all(record["actor/grad_norm"] > 0 for record in run.trained)
    games = run.games
    assert len(games) == 8
    assert {game.task.source for game in games} == {"textarena"}
    assert all(game.task.secret in {str(n) for n in range(1, 21)} for game in games)
    # The belief reward is measured like that of every other environment.
    assert all(len(game.beliefs or ()) == game.num_turns + 1 for game in games)
    # A random policy rarely writes a move: two invalid moves in a row end its games.
    assert {game.stop for game in games} <= {
        StopReason.WIN, StopReason.ENDED, StopReason.TURN_LIMIT
    }  # fmt: skip
    assert any(turn.verdict is Verdict.INVALID for game in games for turn in game.turns)
    assert not any(turn.verdict is Verdict.ERROR for game in games for turn in game.turns)
    assert len(run.validated) == 3 * 2
